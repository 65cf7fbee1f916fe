/* Ranks: processes of this host that compute one stage together, each with a part of every matrix.
 * They meet in memory that all of them map. */
#ifndef KUN_RANKS_H
#define KUN_RANKS_H

#include "api.h"

/* Inside a job, by every thread: wait for the threads of all ranks; with `ranks` NULL for those of
 * this process. Returns at once when a rank is lost: what is computed from then on is not used. */
void ranks_barrier(kun_ranks *ranks);

/* The same for the only thread of each process that is outside of a job. */
void kun_ranks_meet(kun_ranks *ranks);
/* Rank 0 has written a command where the others look for it. */
void kun_ranks_tell(kun_ranks *ranks);
/* The number of the last command, once it is not `seen` any more; or `seen` after so long. */
int32_t kun_ranks_wait(kun_ranks *ranks, int32_t seen, int64_t milliseconds);
/* A rank is gone: nobody waits for it any more. */
void kun_ranks_lose(kun_ranks *ranks);
/* Bytes of the memory in which ranks meet; zeros at first. */
int64_t kun_ranks_meeting_bytes(void);

#endif
