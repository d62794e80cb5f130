"""What a ring stands on: processes that find each other, exchange messages, and say who of them has failed.

    comm          a process in the ring: a message to one neighbour, and one from the other
    agree         the check that all ranks make the same call
    side          the stream and the memory with which ranks of a host copy beside the computation
    watch         who is stuck, and why: note, where a rank stands; board, where all read it; verdict, whose fault it is
    launch        starts the ranks; environment: what torchrun, mpirun and srun say to each of them

Nothing here knows of attention.
"""
