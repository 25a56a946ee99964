//! AMX: blocks of 16 rows of 64 bytes, in tile registers that only assembly reaches.
//!
//! No register carries anything from one piece of assembly to the next but the shapes of the tiles,
//! which nothing else sets between `enter` and `leave`.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and helpers must melt into the \
              function that carries the target features"
)]
mod codes;
mod words;

use std::arch::asm;
use std::sync::OnceLock;

use super::super::avx512::Avx512;
use super::super::simd::LINE;
use super::codes::Codes;
use super::unit::{Side, Unit};
use super::{BLOCK, Setting, VISIT, WORDS};

/// Witness that the tiles are set up: made only inside functions that need it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

/// Whether the CPU has tiles of bf16 and of bytes, and what brings in codes, as all with tiles
/// have, and the system lets this process use them, which it is asked once.
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

/// Leaf 7 of CPUID: bits 22 (AMX-BF16), 24 (AMX-TILE) and 25 (AMX-INT8) of EDX.
fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
    const ALL: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    let (leaves, _) = __get_cpuid_max(0);
    leaves >= 7 && __cpuid_count(7, 0).edx & ALL == ALL
}

/// Asks Linux for the state of tiles, which it keeps for processes that want it alone.
#[cfg(target_os = "linux")]
fn is_allowed() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the call reads its arguments alone, and changes nothing but what the process may use;
    // the instruction overwrites rcx and r11.
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

/// Sets up all tiles as blocks. Returns how they were set up: other libraries may count on that.
///
/// # Safety
/// 1. The CPU has AMX, and the process may use it.
unsafe fn enter() -> Setting {
    let mut before = Setting([0; 64]);
    // SAFETY: 64 bytes of the setting's form; condition 1.
    unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut before, options(nostack)) };
    // SAFETY: condition 1; the setting is valid.
    unsafe { set_up(&BLOCKS) };
    before
}

/// Sets up tiles 0 to 5 for [`Unit::multiply`]: scores of so many columns, a multiple of four, sums
/// of so many rows; both at least 1 and [`BLOCK`] at most.
///
/// # Safety
/// 1. Between `enter` and `leave`.
unsafe fn narrow(columns: usize, rows: usize) {
    let Setting(mut bytes) = BLOCKS;
    assert!((1..=BLOCK).contains(&columns) && (1..=BLOCK).contains(&rows), "sizes of tiles");
    let [columns, rows] = [4 * columns, rows].map(|size| u8::try_from(size).unwrap_or(0));
    (bytes[16], bytes[20]) = (columns, columns);
    (bytes[51], bytes[52]) = (rows, rows);
    // SAFETY: condition 1; the setting is valid.
    unsafe { set_up(&Setting(bytes)) };
}

/// Palette 1; from byte 16 on bytes of a row, two for each tile; from byte 48 on rows of each.
static BLOCKS: Setting = {
    let (mut bytes, mut tile) = ([0; 64], 0);
    bytes[0] = 1;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Setting(bytes)
};

/// Sets up the tiles, or gives them back.
///
/// # Safety
/// 1. The CPU has AMX, and the process may use it.
/// 2. The setting is valid, as one that comes from `enter` is.
unsafe fn set_up(setting: &Setting) {
    // SAFETY: conditions 1 and 2. Of palette 0, all zeros, nothing is left in use.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *setting, options(nostack, readonly)) };
}

impl Unit for Amx {
    #[inline(always)]
    unsafe fn dots(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        (to, stride): (*mut f32, usize),
        more: bool,
    ) {
        let part = steps * WORDS;
        // SAFETY: the blocks are those of conditions 1 and 2, and the tiles are set up, by the
        // witness.
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
    unsafe fn add<const LEFT: usize, const RIGHT: usize>(
        self,
        weights: *const u32,
        (values, apart): (*const u32, usize),
        columns: usize,
        (to, stride): (*mut f32, usize),
    ) {
        // SAFETY: the blocks are those of conditions 1 and 2, and the tiles are set up, by the
        // witness.
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
                // Of both halves of the tokens, the values' second terms, if any, and their first.
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
    fn stay_awake(self) {
        // SAFETY: tiles are set up for this product, by the witness; all registers are free between
        // pieces of assembly.
        unsafe {
            asm!("tdpbf16ps tmm3, tmm4, tmm5", out("tmm3") _, options(nomem, nostack));
        }
    }

    #[inline(always)]
    unsafe fn multiply<const SCORES: bool, const BYTES: bool>(
        self,
        left: Side,
        right: Side,
        steps: usize,
        (to, more): (*mut [f32; WORDS], bool),
    ) {
        // SAFETY: the blocks are those of conditions 1 and 2, and the tiles are set up, by the
        // witness.
        unsafe {
            asm!(
                "tilezero tmm{to_tile}",
                "test {more}, {more}",
                "jz 2f",
                "tileloadd tmm{to_tile}, [{to} + {line}]",
                "2:",
                "tileloadd tmm{left_tile}, [{left} + {stride}]",
                "tileloadd tmm{right_tile}, [{right} + {columns}]",
                ".if {bytes}",
                "tdpbssd tmm{to_tile}, tmm{left_tile}, tmm{right_tile}",
                ".else",
                "tdpbf16ps tmm{to_tile}, tmm{left_tile}, tmm{right_tile}",
                ".endif",
                "add {left}, {step}",
                "add {right}, {apart}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{to} + {line}], tmm{to_tile}",
                bytes = const if BYTES { 1 } else { 0 },
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
        // SAFETY: condition 1, and the CPU has what is there where tiles are, by the witness.
        unsafe { codes::words::<false>(codes, from, to) }
    }

    #[inline(always)]
    unsafe fn code_line(self, codes: &Codes, from: *const u8, to: [*mut u32; 2]) {
        // SAFETY: as above.
        unsafe { codes::line(codes, from, to) }
    }

    #[inline(always)]
    unsafe fn code_pairs(self, codes: &Codes, from: [*const u8; 4], to: [*mut u32; 4]) {
        // SAFETY: as above.
        unsafe { codes::words::<true>(codes, from, to) }
    }
}

const _: () = assert!(VISIT == 4 * BLOCK && WORDS * 4 == 1024, "what the assembly counts on");

super::table::table! { [
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,gfni")]
]
Avx512::witness(), Amx(()), enter, set_up, narrow }
