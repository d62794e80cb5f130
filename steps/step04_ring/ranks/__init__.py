"""The ranks of a ring: processes that find each other, exchange messages, and say which of them has failed.

    comm          a process in the ring: a message to one neighbour, and one from the other
    agree         the check that all ranks make the same call
    side          the stream and the memory with which ranks of a host copy during the computation
    watch         who is stuck, and why: note, where a rank stands; board, where all read it; verdict, whose fault it is
    launch        starts the ranks; environment: the variables that torchrun, mpirun and srun set for each of them

Nothing here depends on attention.
"""
