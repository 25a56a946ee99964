// Prefill kernels over l4: prefill_staged.h.
#include "prefill_staged.h"

KV_KERNEL(prefill_l4_64, KvPrefillParams, 128, 2, kv_prefill_staged<64, KvStagedL4>)
KV_KERNEL(prefill_l4_128, KvPrefillParams, 128, 2, kv_prefill_staged<128, KvStagedL4>)
