// Updates entries of the block tables that changed since the last step.
//
// update_tables: grid min(ceil(num_changes / 256), 1024), 256 threads, no shared memory.
#include "params.h"

KV_DEV void kv_update_tables(const KvTableParams& p) {
  const KvTableChange* changes = (const KvTableChange*)p.changes;
  u32* tables = (u32*)p.tables;
  for (u32 i = blockIdx.x * 256 + threadIdx.x; i < p.num_changes; i += gridDim.x * 256)
    tables[changes[i].at] = changes[i].block;
}

KV_KERNEL(update_tables, KvTableParams, 256, 1, kv_update_tables)
