"""The round protocol with many members, in virtual time, over a faulty network."""
