//! Main loops of kernels in the machine code for `sm_90a`, written by `cargo xtask gate --update`.
//! A stage of `cargo xtask test` compares them with the archive.
use super::predict::Loop;

/// Decode and prefill kernels with a head dim of 128.
#[rustfmt::skip]
pub(super) const LOOPS: &[Loop] = &[
    Loop { kernel: "decode_bf16_128", bytes: 16384, cycles: 3345.9, cycles_alone: 2812.6 },
    Loop { kernel: "decode_f16_128", bytes: 16384, cycles: 3593.7, cycles_alone: 2889.4 },
    Loop { kernel: "decode_e4m3_128", bytes: 8192, cycles: 3130.0, cycles_alone: 2527.0 },
    Loop { kernel: "decode_e5m2_128", bytes: 8192, cycles: 3105.0, cycles_alone: 2542.6 },
    Loop { kernel: "decode_int8_128", bytes: 8192, cycles: 3403.8, cycles_alone: 2670.6 },
    Loop { kernel: "decode_e4m3_row_128", bytes: 8320, cycles: 3396.8, cycles_alone: 2674.8 },
    Loop { kernel: "decode_e5m2_row_128", bytes: 8320, cycles: 3406.0, cycles_alone: 2674.8 },
    Loop { kernel: "decode_int8_row_128", bytes: 8320, cycles: 3460.0, cycles_alone: 2790.6 },
    Loop { kernel: "decode_l4_128", bytes: 4224, cycles: 3958.6, cycles_alone: 2952.6 },
    Loop { kernel: "prefill_bf16_128", bytes: 8192, cycles: 5211.4, cycles_alone: 3819.6 },
    Loop { kernel: "prefill_f16_128", bytes: 8192, cycles: 5210.0, cycles_alone: 3819.6 },
];
