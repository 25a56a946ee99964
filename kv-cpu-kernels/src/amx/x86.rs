//! AMX in assembly: the compiler has no tile registers. One holds a block, 16 rows of 64 bytes.
//!
//! No tile register carries a value from one piece of assembly to the next. Only their shapes
//! persist, which nothing else sets between `enter` and `leave`.
#![expect(
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use std::arch::asm;
use std::sync::OnceLock;

use super::codes::Codes;
use super::table::TileConfig;
use super::unit::{Operand, Unit};
use super::{BLOCK, BLOCK_WORDS, GEMM_TOKENS, x86_codes};
use crate::avx512::Avx512;
use crate::simd::LINE;

/// Witness that tile registers are configured: made only inside the functions of the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

/// Returns whether the CPU has AMX for bf16 and the vector instructions that look codes up, and the
/// operating system lets this process use tile registers. Detects once.
pub(crate) fn is_available() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        has_tiles()
            && std::arch::is_x86_feature_detected!("avx512vbmi")
            && std::arch::is_x86_feature_detected!("avx512vbmi2")
            && std::arch::is_x86_feature_detected!("gfni")
            && is_allowed()
    })
}

/// Reads bits 22 (AMX-BF16) and 24 (AMX-TILE) of EDX of CPUID leaf 7.
fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
    const ALL: u32 = 1 << 22 | 1 << 24;
    let (leaves, _) = __get_cpuid_max(0);
    leaves >= 7 && __cpuid_count(7, 0).edx & ALL == ALL
}

/// Requests the state of tile registers from Linux, which saves it only on request.
#[cfg(target_os = "linux")]
fn is_allowed() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the system call reads only its arguments and changes only what the process may use;
    // it overwrites rcx and r11.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
             in("rsi") XTILEDATA, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}
#[cfg(not(target_os = "linux"))]
fn is_allowed() -> bool {
    false
}

/// Configures all tile registers as blocks. Returns the configuration before, which another library
/// may rely on.
///
/// # Safety
/// 1. The CPU has AMX, and the process may use it.
unsafe fn enter() -> TileConfig {
    let mut before = TileConfig([0; 64]);
    // SAFETY: 64 bytes, as a configuration has; condition 1.
    unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut before, options(nostack)) };
    // SAFETY: condition 1; the configuration is valid.
    unsafe { configure(&BLOCKS) };
    before
}

/// Configures tile registers 0 to 5 for [`Unit::multiply`]: scores of `columns` columns, a multiple
/// of four, and sums of `rows` rows, both in `1..=BLOCK`.
///
/// # Safety
/// 1. Between `enter` and `leave`.
unsafe fn narrow(columns: usize, rows: usize) {
    let TileConfig(mut bytes) = BLOCKS;
    assert!((1..=BLOCK).contains(&columns) && (1..=BLOCK).contains(&rows), "sizes of tiles");
    let [columns, rows] = [4 * columns, rows].map(|size| u8::try_from(size).unwrap_or(0));
    (bytes[16], bytes[20]) = (columns, columns);
    (bytes[51], bytes[52]) = (rows, rows);
    // SAFETY: condition 1; the configuration is valid.
    unsafe { configure(&TileConfig(bytes)) };
}

/// Palette 1; from byte 16 on the bytes of a row, two a tile; from byte 48 on the rows of each
/// tile.
static BLOCKS: TileConfig = {
    let (mut bytes, mut tile) = ([0; 64], 0);
    bytes[0] = 1;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    TileConfig(bytes)
};

/// Configures the tile registers, or releases them.
///
/// # Safety
/// 1. The CPU has AMX, and the process may use it.
/// 2. The configuration is valid, as one that comes from `enter` is.
unsafe fn configure(config: &TileConfig) {
    // SAFETY: conditions 1 and 2. All zeros release the registers.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *config, options(nostack, readonly)) };
}

impl Unit for Amx {
    #[inline(always)]
    unsafe fn gemm_scores(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        (to, stride): (*mut f32, usize),
        more: bool,
    ) {
        let part = steps * BLOCK_WORDS;
        // SAFETY: the blocks are those of conditions 1 and 2, and the tile registers are
        // configured, by the witness.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {more}, {more}",
                "jz 2f",
                "tileloadd tmm0, [{to} + {stride}]",
                "tileloadd tmm1, [{to} + {stride} + 64]",
                "tileloadd tmm2, [{to} + {stride} + 128]",
                "tileloadd tmm3, [{to} + {stride} + 192]",
                "2:",
                "tileloadd tmm4, [{q} + {line}]",
                "tileloadd tmm5, [{first} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{second} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm5, [{third} + {line}]",
                "tdpbf16ps tmm2, tmm4, tmm5",
                "tileloadd tmm6, [{fourth} + {line}]",
                "tdpbf16ps tmm3, tmm4, tmm6",
                "add {q}, 1024",
                "add {first}, 1024",
                "add {second}, 1024",
                "add {third}, 1024",
                "add {fourth}, 1024",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{to} + {stride}], tmm0",
                "tilestored [{to} + {stride} + 64], tmm1",
                "tilestored [{to} + {stride} + 128], tmm2",
                "tilestored [{to} + {stride} + 192], tmm3",
                first = inout(reg) k => _, second = inout(reg) k.wrapping_add(part) => _,
                third = inout(reg) k.wrapping_add(2 * part) => _,
                fourth = inout(reg) k.wrapping_add(3 * part) => _,
                q = inout(reg) q => _, steps = inout(reg) steps => _,
                to = in(reg) to, stride = in(reg) 4 * stride, line = in(reg) LINE,
                more = in(reg) usize::from(more),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack),
            );
        }
    }

    #[inline(always)]
    unsafe fn gemm_sums<const LEFT: usize, const RIGHT: usize>(
        self,
        weights: *const u32,
        (values, apart): (*const u32, usize),
        columns: usize,
        (to, stride): (*mut f32, usize),
    ) {
        // SAFETY: the blocks are those of conditions 1 and 2, and the tile registers are
        // configured, by the witness.
        unsafe {
            asm!(
                "tileloadd tmm2, [{w} + {line}]",
                "tileloadd tmm3, [{w} + {line} + 1024]",
                ".if {left} == 3",
                "tileloadd tmm4, [{w} + {line} + 2048]",
                ".endif",
                "tileloadd tmm5, [{w} + {line} + 1024 * {left}]",
                "tileloadd tmm6, [{w} + {line} + 1024 * {left} + 1024]",
                ".if {left} == 3",
                "tileloadd tmm7, [{w} + {line} + 1024 * {left} + 2048]",
                ".endif",
                "2:",
                "tileloadd tmm0, [{to} + {stride}]",
                // The values' second terms, if any, then their first, for both halves of the
                // tokens.
                "lea {half}, [{v} + {apart}]",
                ".if {right} == 2",
                "tileloadd tmm1, [{half} + {line}]",
                ".if {left} == 3",
                "tdpbf16ps tmm0, tmm3, tmm1",
                ".endif",
                "tdpbf16ps tmm0, tmm2, tmm1",
                "lea {half}, [{half} + 2 * {apart}]",
                "tileloadd tmm1, [{half} + {line}]",
                ".if {left} == 3",
                "tdpbf16ps tmm0, tmm6, tmm1",
                ".endif",
                "tdpbf16ps tmm0, tmm5, tmm1",
                "sub {half}, {apart}",
                ".endif",
                "tileloadd tmm1, [{v} + {line}]",
                ".if {left} == 3",
                "tdpbf16ps tmm0, tmm4, tmm1",
                ".endif",
                "tdpbf16ps tmm0, tmm3, tmm1",
                "tdpbf16ps tmm0, tmm2, tmm1",
                "tileloadd tmm1, [{half} + {line}]",
                ".if {left} == 3",
                "tdpbf16ps tmm0, tmm7, tmm1",
                ".endif",
                "tdpbf16ps tmm0, tmm6, tmm1",
                "tdpbf16ps tmm0, tmm5, tmm1",
                "tilestored [{to} + {stride}], tmm0",
                "add {v}, 1024",
                "add {to}, 64",
                "dec {columns}",
                "jnz 2b",
                left = const LEFT, right = const RIGHT, half = out(reg) _,
                w = in(reg) weights, v = inout(reg) values => _, apart = in(reg) 4 * apart,
                columns = inout(reg) columns => _,
                to = inout(reg) to => _, stride = in(reg) 4 * stride, line = in(reg) LINE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    #[inline(always)]
    fn keep_powered(self) {
        // SAFETY: tile registers are configured for this product, by the witness, and all of them
        // are free between pieces of assembly.
        unsafe {
            asm!("tdpbf16ps tmm3, tmm4, tmm5", out("tmm3") _, options(nomem, nostack));
        }
    }

    #[inline(always)]
    unsafe fn multiply<const SCORES: bool>(
        self,
        left: Operand,
        right: Operand,
        steps: usize,
        (to, more): (*mut [f32; BLOCK_WORDS], bool),
    ) {
        // SAFETY: the blocks are those of conditions 1 and 2, and the tile registers are
        // configured, by the witness.
        unsafe {
            asm!(
                "tilezero tmm{to_tile}",
                "test {more}, {more}",
                "jz 2f",
                "tileloadd tmm{to_tile}, [{to} + {line}]",
                "2:",
                "tileloadd tmm{left_tile}, [{left} + {stride}]",
                "tileloadd tmm{right_tile}, [{right} + {columns}]",
                "tdpbf16ps tmm{to_tile}, tmm{left_tile}, tmm{right_tile}",
                "add {left}, {step}",
                "add {right}, {apart}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{to} + {line}], tmm{to_tile}",
                to_tile = const if SCORES { 0 } else { 3 },
                left_tile = const if SCORES { 1 } else { 4 },
                right_tile = const if SCORES { 2 } else { 5 },
                left = inout(reg) left.at => _, stride = in(reg) left.stride,
                step = in(reg) left.step, right = inout(reg) right.at => _,
                columns = in(reg) right.stride, apart = in(reg) right.step,
                steps = inout(reg) steps => _,
                to = in(reg) to, line = in(reg) LINE, more = in(reg) usize::from(more),
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack),
            );
        }
    }

    #[inline(always)]
    unsafe fn code_words(self, codes: &Codes, from: [*const u8; 4], to: [*mut u32; 4]) {
        // SAFETY: condition 1, and `is_available` detected the features, by the witness.
        unsafe { x86_codes::words::<false>(codes, from, to) }
    }

    #[inline(always)]
    unsafe fn code_line(self, codes: &Codes, from: *const u8, to: [*mut u32; 2]) {
        // SAFETY: as above.
        unsafe { x86_codes::line(codes, from, to) }
    }

    #[inline(always)]
    unsafe fn code_pairs(self, codes: &Codes, from: [*const u8; 4], to: [*mut u32; 4]) {
        // SAFETY: as above.
        unsafe { x86_codes::words::<true>(codes, from, to) }
    }
}

const _: () = assert!(
    GEMM_TOKENS == 4 * BLOCK && BLOCK_WORDS * 4 == 1024,
    "the assembly relies on these sizes"
);

super::table::table! { [
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,gfni")]
]
Avx512::witness(), Amx(()), enter, configure, narrow }
