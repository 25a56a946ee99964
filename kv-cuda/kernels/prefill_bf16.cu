// Prefill kernels over bf16 rows: prefill.h.
#include "prefill.h"

KV_KERNEL(prefill_bf16_64, KvPrefillParams, 128, 2, kv_prefill<KvBf16, 64>)
KV_KERNEL(prefill_bf16_80, KvPrefillParams, 128, 2, kv_prefill<KvBf16, 80>)
KV_KERNEL(prefill_bf16_96, KvPrefillParams, 128, 2, kv_prefill<KvBf16, 96>)
KV_KERNEL(prefill_bf16_128, KvPrefillParams, 128, 2, kv_prefill<KvBf16, 128>)
KV_KERNEL(prefill_bf16_192, KvPrefillParams, 128, 1, kv_prefill<KvBf16, 192>)
KV_KERNEL(prefill_bf16_256, KvPrefillParams, 128, 1, kv_prefill<KvBf16, 256>)
