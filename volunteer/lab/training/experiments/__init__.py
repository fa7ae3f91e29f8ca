"""The experiments that `allmende lab` knows by name; one source file each."""
