// Prefill kernels over f16 rows: prefill.h.
#include "prefill.h"

KV_KERNEL(prefill_f16_64, KvPrefillParams, 128, 2, kv_prefill<KvF16, 64>)
KV_KERNEL(prefill_f16_80, KvPrefillParams, 128, 2, kv_prefill<KvF16, 80>)
KV_KERNEL(prefill_f16_96, KvPrefillParams, 128, 2, kv_prefill<KvF16, 96>)
KV_KERNEL(prefill_f16_128, KvPrefillParams, 128, 2, kv_prefill<KvF16, 128>)
KV_KERNEL(prefill_f16_192, KvPrefillParams, 128, 1, kv_prefill<KvF16, 192>)
KV_KERNEL(prefill_f16_256, KvPrefillParams, 128, 1, kv_prefill<KvF16, 256>)
