// Decoding: K, V and queries in bf16.
#include "decode.h"
KV_DECODE_KERNELS(decode_bf16, KvDecodePlain<KvBf16>)
