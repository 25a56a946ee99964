// Decode kernels: K and V in e4m3 with a calibrated scale, queries in f16 or bf16.
#include "decode.h"
KV_DECODE(decode_e4m3_64, KvDecodeCodes<KvCodeE4m3>, 64)
KV_DECODE(decode_e4m3_80, KvDecodeCodes<KvCodeE4m3>, 80)
KV_DECODE(decode_e4m3_96, KvDecodeCodes<KvCodeE4m3>, 96)
KV_DECODE(decode_e4m3_128, KvDecodeCodes<KvCodeE4m3>, 128)
KV_DECODE(decode_e4m3_192, KvDecodeCodes<KvCodeE4m3>, 192)
KV_DECODE(decode_e4m3_256, KvDecodeCodes<KvCodeE4m3>, 256)
