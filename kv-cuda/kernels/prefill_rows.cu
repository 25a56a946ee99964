// Prefill kernels over one-byte codes with a scale per row: prefill_staged.h.
#include "prefill_staged.h"

KV_KERNEL(prefill_rows_64, KvPrefillParams, 128, 2, kv_prefill_staged<64, KvStagedRows>)
KV_KERNEL(prefill_rows_128, KvPrefillParams, 128, 2, kv_prefill_staged<128, KvStagedRows>)
