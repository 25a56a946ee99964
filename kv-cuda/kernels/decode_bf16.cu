// Decode kernels: K, V and queries in bf16.
#include "decode.h"
KV_DECODE(decode_bf16_64, KvDecodePlain<KvBf16>, 64)
KV_DECODE(decode_bf16_80, KvDecodePlain<KvBf16>, 80)
KV_DECODE(decode_bf16_96, KvDecodePlain<KvBf16>, 96)
KV_DECODE(decode_bf16_128, KvDecodePlain<KvBf16>, 128)
KV_DECODE(decode_bf16_192, KvDecodePlain<KvBf16>, 192)
KV_DECODE(decode_bf16_256, KvDecodePlain<KvBf16>, 256)
