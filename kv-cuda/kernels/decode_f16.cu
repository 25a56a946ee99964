// Decoding: K, V and queries in f16.
#include "decode.h"
KV_DECODE_KERNELS(decode_f16, KvDecodePlain<KvF16>)
