// Prefill kernels over one-byte codes with a calibrated scale: prefill_staged.h.
#include "prefill_staged.h"

KV_KERNEL(prefill_codes_64, KvPrefillParams, 128, 2, kv_prefill_staged<64, KvStagedCodes>)
KV_KERNEL(prefill_codes_128, KvPrefillParams, 128, 2, kv_prefill_staged<128, KvStagedCodes>)
