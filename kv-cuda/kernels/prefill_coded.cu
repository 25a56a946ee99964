// Prefill kernels over codes: prefill_coded.h.
#include "prefill_coded.h"

KV_KERNEL(prefill_coded_64, KvPrefillParams, 128, 2, kv_prefill_coded<64>)
KV_KERNEL(prefill_coded_80, KvPrefillParams, 128, 2, kv_prefill_coded<80>)
KV_KERNEL(prefill_coded_96, KvPrefillParams, 128, 2, kv_prefill_coded<96>)
KV_KERNEL(prefill_coded_128, KvPrefillParams, 128, 2, kv_prefill_coded<128>)
KV_KERNEL(prefill_coded_192, KvPrefillParams, 128, 1, kv_prefill_coded<192>)
KV_KERNEL(prefill_coded_256, KvPrefillParams, 128, 1, kv_prefill_coded<256>)
