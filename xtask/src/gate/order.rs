//! The wait of a kernel for the kernel before it, which must come before every access to memory.
//!
//! Kernels may be launched before the previous one has ended (`kv-cuda/src/driver/dependent.rs`).
//! The source waits first, but a compiler may move loads that it takes for constant, as those of
//! tables, and the emulator does not see its code.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use super::sass::{Instruction, Kernel};

/// The wait: `griddepcontrol.wait` of PTX.
const WAIT: &str = "ACQBULK";
/// Instructions with which the code goes on elsewhere.
const JUMPS: &[&str] = &["BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT"];
/// Instructions that read or write global memory.
const ACCESSES: &[&str] =
    &["LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UTMALDG"];

/// Returns what is wrong with the order of a kernel's first instructions.
pub(super) fn problem(kernel: &Kernel) -> Option<String> {
    let name = &kernel.name;
    let is_of = |one: &Instruction, bases: &[&str]| bases.contains(&one.base());
    let ends =
        |one: &&Instruction| is_of(one, &[WAIT]) || is_of(one, JUMPS) || is_of(one, ACCESSES);
    let Some(first) = kernel.instructions.iter().find(ends) else {
        return Some(format!("{name}: no {WAIT}"));
    };
    if first.base() == WAIT && !first.is_predicated {
        return None;
    }
    Some(format!("{name}: {} at {:#x} comes before the wait", first.opcode, first.address))
}
