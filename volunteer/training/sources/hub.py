"""Documents of a dataset of the Hugging Face hub, or of a folder in its form, one after the other.

Runs in: trainer. By the library `datasets` (an extra of the package), streaming: nothing but what
is read is fetched. Datasets are data: the library runs no code of theirs (since its version 4). The
owner's token for the hub is not used: what a RunSpec names must be open to everyone. And it must be
all there: a dataset may not send its readers to files of their own machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from volunteer.data.sources import Source
from volunteer.errors import DataUnavailableError

_INSTALL = "pipx inject allmende datasets"
_SOME_DOCUMENTS = 10_000
"""Where a dataset does not say how many it has, a volunteer begins at one of the first so many."""
_MAX_REASON_CHARS = 200
_HUB = "hf://"


class HubDataset:
    """One dataset."""

    def __init__(self, source: Source, cache_dir: Path) -> None:
        """Nothing is fetched before it is asked for.

        Args:
            source: of kind HF.
            cache_dir: for what the library keeps.
        """
        self._source = source
        self._cache_dir = cache_dir
        self._dataset: Any = None

    def num_shards(self) -> int:
        """Return the number of its files, at least 1.

        Raises:
            DataUnavailableError: it cannot be reached, or is none.
        """
        return max(1, int(self._open().num_shards))

    def documents_per_shard(self) -> int:
        """Return about how many documents a file has; a guess where nobody says.

        Raises:
            DataUnavailableError: it cannot be reached.
        """
        splits = getattr(self._open().info, "splits", None) or {}
        split = splits.get(self._source.split) if hasattr(splits, "get") else None
        num_examples = getattr(split, "num_examples", None) or 0
        return max(1, num_examples // self.num_shards()) if num_examples else _SOME_DOCUMENTS

    def read(self, shard: int, start: int) -> Iterator[str]:
        """Yield the documents of a file from number `start` on; none if it has fewer.

        Raises:
            DataUnavailableError: it cannot be reached, or has no text.
        """
        dataset = self._open()
        num_shards = self.num_shards()
        try:
            part = dataset.shard(num_shards=num_shards, index=shard) if num_shards > 1 else dataset
            for row in part.skip(start):
                if not isinstance(row.get("text"), str):
                    raise DataUnavailableError(f"{self._source.text} has no field `text`")
                yield row["text"]
        except DataUnavailableError:
            raise
        except Exception as error:  # the library raises whatever its readers and the net raise
            raise self._failure(error) from error

    def close(self) -> None:
        """Forget what is open: the next reading begins anew, as after an error of the network."""
        self._dataset = None

    def _open(self) -> Any:  # noqa: ANN401 - the library has no types that could be imported
        if self._dataset is not None:
            return self._dataset
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
        try:
            import datasets
        except ImportError as error:
            raise DataUnavailableError(
                f"{self._source.text} needs the library `datasets`", hint=_INSTALL
            ) from error
        datasets.disable_progress_bars()
        name = self._source.name
        if not self._source.is_on_disk and os.path.lexists(name):
            # The library would read that folder, for which nobody has asked the owner.
            raise DataUnavailableError(f"{self._source.text} is a folder of this machine as well")
        try:
            builder = datasets.load_dataset_builder(
                name,
                self._source.config or None,
                token=False,
                cache_dir=str(self._cache_dir),
            )
            if not self._source.is_on_disk:
                self._verify_files(builder.config.data_files)
            self._dataset = builder.as_streaming_dataset(split=self._source.split)
        except DataUnavailableError:
            raise
        except Exception as error:  # the library raises whatever its readers and the net raise
            raise self._failure(error) from error
        return self._dataset

    def _verify_files(self, files_by_split: Mapping[str, Sequence[str]] | None) -> None:
        """Check that a dataset of the hub has its files there.

        Its README says which they are, and a stranger writes that: the library takes paths of this
        machine and addresses of its network as well, and chains of both.

        Raises:
            DataUnavailableError: it has others, or none.
        """
        files = [str(file) for files in (files_by_split or {}).values() for file in files]
        if not files or any(not file.startswith(_HUB) or "::" in file for file in files):
            raise DataUnavailableError(
                f"{self._source.text} names files that are not on the hub: none of it is read"
            )

    def _failure(self, error: Exception) -> DataUnavailableError:
        """Return what the library raised, which may be anything that readers and networks raise."""
        self.close()
        reason = str(error).strip().splitlines()[0:1] or [type(error).__name__]
        return DataUnavailableError(
            f"{self._source.text} cannot be read: {reason[0]}"[:_MAX_REASON_CHARS],
            hint="it is tried again by itself; `allmende logs --source trainer` tells more",
        )
