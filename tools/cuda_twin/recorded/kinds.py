"""What the null device records."""

import enum


class Kind(enum.IntEnum):
    """As in ``device.h``, which says what the numbers of each are."""

    LAUNCH = 1
    TRITON = 2
    PRODUCT = 3
    COLLECTIVE = 4
    COPY = 5
    FILL = 6
    HOST_WAIT = 7
    EVENT = 8
    WAIT = 9
    ALLOCATE = 10
    UNKNOWN = 11
    READ = 12
    WRITE = 13
    FRESH = 14
    SHARED = 15
    GRAPH = 16


WORK = (Kind.LAUNCH, Kind.TRITON, Kind.PRODUCT, Kind.FILL, Kind.GRAPH)
"""What the device is given to do beside copies and collectives; each is launched by the host, a graph as one."""
OF_MEMORY = (Kind.READ, Kind.WRITE, Kind.FRESH, Kind.SHARED)
"""Which memory it is done with: of ``ordering.py`` alone."""
