// Decode kernels: K, V and queries in f16.
#include "decode.h"
KV_DECODE(decode_f16_64, KvDecodePlain<KvF16>, 64)
KV_DECODE(decode_f16_80, KvDecodePlain<KvF16>, 80)
KV_DECODE(decode_f16_96, KvDecodePlain<KvF16>, 96)
KV_DECODE(decode_f16_128, KvDecodePlain<KvF16>, 128)
KV_DECODE(decode_f16_192, KvDecodePlain<KvF16>, 192)
KV_DECODE(decode_f16_256, KvDecodePlain<KvF16>, 256)
