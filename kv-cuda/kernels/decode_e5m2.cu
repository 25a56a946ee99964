// Decode kernels: K and V in e5m2 with a calibrated scale, queries in f16 or bf16.
#include "decode.h"
KV_DECODE(decode_e5m2_64, KvDecodeCodes<KvCodeE5m2>, 64)
KV_DECODE(decode_e5m2_80, KvDecodeCodes<KvCodeE5m2>, 80)
KV_DECODE(decode_e5m2_96, KvDecodeCodes<KvCodeE5m2>, 96)
KV_DECODE(decode_e5m2_128, KvDecodeCodes<KvCodeE5m2>, 128)
KV_DECODE(decode_e5m2_192, KvDecodeCodes<KvCodeE5m2>, 192)
KV_DECODE(decode_e5m2_256, KvDecodeCodes<KvCodeE5m2>, 256)
