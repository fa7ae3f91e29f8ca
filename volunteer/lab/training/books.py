"""What a chain would know of the workers' past: probation, repeated contents, strikes.

Runs in: lab. Pure.

The same calls as in rounds/chain.py, on records that nobody signs and a chain that never branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from blake3 import blake3

from volunteer.lab.training.scorers import Verdicts
from volunteer.lab.training.worker import Sent
from volunteer.messages import ListedWork, Outcome
from volunteer.rounds.attendance import next_times_listed
from volunteer.rounds.bad_work import is_stale, next_contents
from volunteer.rounds.exclusion import PROBATION_ROUNDS, Strikes
from volunteer.rounds.records import DENSE_MODULE, Contribution
from volunteer.rounds.scoring import blamed_authors
from volunteer.rounds.tally import Tally
from volunteer.training.compression import EncodedGradient


def content_hash(gradient: EncodedGradient) -> str:
    """Return the hash of a blob's tensors without its header, as content_hash.py does of a file."""
    hasher = blake3()
    for tensor in gradient.tensors:
        hasher.update(tensor.cpu().numpy().tobytes())
    return hasher.hexdigest()


class Books:
    """What is known at the latest commit."""

    def __init__(self) -> None:
        """Begin before the first one."""
        self.height = 0
        self._strikes = Strikes()
        self._contents: Mapping[str, tuple[int, int]] = {}
        self._times_listed = Tally()
        self._verdicts = Verdicts()

    def listed_works(
        self, sent: Sequence[Sent], *, is_uniform: bool = False
    ) -> tuple[ListedWork, ...]:
        """Return contributions as the next commit would list them.

        Args:
            sent: in list order.
            is_uniform: weigh all alike, whatever they trained; the program never does.
        """
        return tuple(self._listed(one, is_uniform=is_uniform) for one in sent)

    def note_commit(
        self,
        sent: Sequence[Sent],
        outcomes: Sequence[Outcome],
        members: frozenset[str],
        verdicts: Verdicts | None = None,
    ) -> frozenset[str]:
        """Enter a commit that lists `sent`.

        Args:
            sent: in list order.
            outcomes: what became of each.
            members: everyone who takes part: the roster.
            verdicts: of this commit's scorers, who state them in their next contributions; None:
                nobody scores.

        Returns:
            Who is excluded by it.
        """
        self.height += 1
        authors = frozenset(one.author for one in sent)
        pairs = zip(sent, outcomes, strict=True)
        before = self._strikes.excluded(self.height + 1)
        self._strikes = self._strikes.after(
            self.height,
            listed=authors,
            marked={one.author for one, outcome in pairs if outcome.is_marked},
            blamed=self._blamed(sent),
            rosters=(members,),
        )
        self._verdicts = verdicts or Verdicts()
        self._contents = next_contents(self._contents, self.height, [_record(one) for one in sent])
        self._times_listed = next_times_listed(self._times_listed, authors)
        return self._strikes.excluded(self.height + 1) - before

    def _blamed(self, sent: Sequence[Sent]) -> frozenset[str]:
        """Return whom the scorers of the last commit condemn in contributions that come now."""
        said = self._verdicts.harmful
        records = [
            msgspec.structs.replace(_record(one), harmful=tuple(sorted(said[one.author])))
            for one in sent
            if one.author in said
        ]
        return blamed_authors(self._verdicts.authors, records, self._verdicts.scorers)

    def _listed(self, one: Sent, *, is_uniform: bool) -> ListedWork:
        height = self.height + 1
        return ListedWork(
            contribution_id=one.contribution_id,
            author=one.author,
            round_index=one.encoded.round_index,
            blob_id=one.encoded.blob_id,
            tokens=1 if is_uniform else one.encoded.tokens,
            is_late=one.encoded.round_index != self.height,
            is_on_probation=self._times_listed.get(one.author, 0) < PROBATION_ROUNDS
            or self._strikes.is_on_probation(one.author, height),
            is_excluded=self._strikes.is_excluded(one.author, height),
            is_stale=is_stale(self._contents, _record(one)),
        )


def _record(one: Sent) -> Contribution:
    """Return what the contribution's record would say, as far as the books look at it."""
    encoded = one.encoded
    return Contribution(
        run_id="",
        module_id=DENSE_MODULE,
        round_index=encoded.round_index,
        author=one.author,
        base=encoded.base,
        vote=True,
        blob_id=encoded.blob_id,
        blob_bytes=encoded.blob_bytes,
        codec=encoded.codec,
        codec_version=encoded.codec_version,
        tokens=encoded.tokens,
        carries=encoded.carries,
        content_hash=content_hash(one.gradient),
    )
