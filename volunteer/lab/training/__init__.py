"""The lab that trains: many workers in one process, on the trainer's own functions."""
