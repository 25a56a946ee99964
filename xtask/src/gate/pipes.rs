//! The pipes of a multiprocessor: what each instruction occupies, and the time of a trip.
//!
//! Warps of one scheduler issue in order, the one that is ready first before the others, to pipes
//! of finite rate. Memory takes no time: copies are free and waits for them never wait, so that the
//! result is the compute side of a trip, to be compared with its bytes. Rates are those of Hopper:
//! the CUDA programming guide's table of throughputs, per scheduler, and 6.6 cycles for an
//! `mma.m16n8k16`, which microbenchmarks of `mma.sync` show.
//!
//! An opcode that no table lists is an error, so that a new one cannot go unnoticed.
use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::sass::{Instruction, SCOREBOARDS};

/// A pipe of a scheduler, or of the multiprocessor that schedulers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pipe {
    Tensor,
    Fma,
    /// The half of the FMA pipe that multiplies integers.
    FmaHeavy,
    Alu,
    /// Transcendental functions and conversions.
    Xu,
    /// Loads, stores, copies and shuffles.
    Lsu,
    Uniform,
    Constant,
    Control,
}

impl Pipe {
    /// Returns whether instructions wait in a queue, and release scoreboards only after the pipe.
    fn is_queued(self) -> bool {
        matches!(self, Self::Lsu | Self::Xu)
    }
}

/// A class of instructions, as the table of the gate counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Hmma,
    Imma,
    Ldsm,
    Lds,
    Sts,
    /// Asynchronous copies to shared memory.
    Ldgsts,
    /// Other loads from global memory.
    Ldg,
    /// Stores to global memory.
    Stg,
    /// Loads and stores of a thread's own memory: spilled registers, arrays.
    Local,
    Atomic,
    Shfl,
    Mufu,
    /// Packing and conversion of 16-bit and 8-bit floats.
    F2fp,
    /// Arithmetic of floats.
    Float,
    /// Everything with integers, predicates and moves.
    Int,
    /// Branches, barriers and waits.
    Control,
}

impl Class {
    /// Returns the name in tables and messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hmma => "HMMA",
            Self::Imma => "IMMA",
            Self::Ldsm => "LDSM",
            Self::Lds => "LDS",
            Self::Sts => "STS",
            Self::Ldgsts => "LDGSTS",
            Self::Ldg => "LDG",
            Self::Stg => "STG",
            Self::Local => "local",
            Self::Atomic => "atomic",
            Self::Shfl => "SHFL",
            Self::Mufu => "MUFU",
            Self::F2fp => "F2FP",
            Self::Float => "float",
            Self::Int => "int",
            Self::Control => "control",
        }
    }
}

/// What an instruction occupies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cost {
    pub(super) class: Class,
    pipe: Pipe,
    /// Cycles of the pipe.
    cycles: f64,
    /// Further cycles until its result is there.
    latency: f64,
}

/// Returns what an instruction occupies.
///
/// # Errors
/// Names an opcode that no table lists.
pub(super) fn cost(one: &Instruction) -> Result<Cost> {
    let (class, pipe) = kind(one)?;
    let by_width = if one.has("128") {
        16.0
    } else if one.has("64") {
        8.0
    } else {
        4.0
    };
    let (cycles, latency) = match class {
        Class::Hmma | Class::Imma => (TENSOR_CYCLES, 0.0),
        Class::Ldsm => (if one.has("4") { 16.0 } else { 8.0 }, 30.0),
        Class::Lds => (by_width, 26.0),
        Class::Ldgsts => (16.0, 20.0),
        Class::Ldg | Class::Local => (by_width, 40.0),
        Class::Sts | Class::Stg | Class::Atomic => (by_width, 20.0),
        Class::Shfl => match one.base() {
            "MOVM" => (8.0, 30.0),
            "SHFL" => (4.0, 22.0),
            _ => (2.0, 0.0),
        },
        Class::Mufu => (8.0, 18.0),
        _ => match pipe {
            Pipe::Fma | Pipe::Control => (1.0, 0.0),
            Pipe::Constant => (2.0, 24.0),
            Pipe::Xu => (8.0, 18.0),
            _ => (2.0, 0.0),
        },
    };
    Ok(Cost { class, pipe, cycles, latency })
}

fn kind(one: &Instruction) -> Result<(Class, Pipe)> {
    let base = one.base();
    let found = KINDS.iter().find(|(_, _, names)| names.contains(&base));
    let (class, pipe, _) =
        found.with_context(|| format!("{:#x}: unknown instruction {}", one.address, one.opcode))?;
    Ok((*class, *pipe))
}

/// Opcodes by class and pipe.
const KINDS: &[(Class, Pipe, &[&str])] = &[
    (Class::Hmma, Pipe::Tensor, &["HMMA"]),
    (Class::Imma, Pipe::Tensor, &["IMMA"]),
    (Class::Ldsm, Pipe::Lsu, &["LDSM"]),
    (Class::Lds, Pipe::Lsu, &["LDS"]),
    (Class::Sts, Pipe::Lsu, &["STS"]),
    (Class::Ldgsts, Pipe::Lsu, &["LDGSTS"]),
    (Class::Ldg, Pipe::Lsu, &["LDG", "LD"]),
    (Class::Stg, Pipe::Lsu, &["STG", "ST"]),
    (Class::Local, Pipe::Lsu, &["LDL", "STL"]),
    (Class::Atomic, Pipe::Lsu, &["ATOMG", "ATOMS", "ATOM", "RED", "REDG", "CCTL"]),
    (Class::Shfl, Pipe::Lsu, &["SHFL", "MOVM"]),
    (Class::Shfl, Pipe::Alu, &["VOTE", "VOTEU", "REDUX", "MATCH"]),
    (Class::Mufu, Pipe::Xu, &["MUFU", "I2F", "F2I", "I2FP", "F2F", "FRND"]),
    (Class::F2fp, Pipe::Alu, &["F2FP"]),
    (Class::Float, Pipe::Fma, &["FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"]),
    (Class::Float, Pipe::Alu, &["FMNMX", "FSEL", "FSETP", "FSET", "FCHK", "HSETP2", "HMNMX2"]),
    (Class::Int, Pipe::FmaHeavy, &["IMAD"]),
    (
        Class::Int,
        Pipe::Alu,
        &[
            "BMSK",
            "BREV",
            "IABS",
            "IADD3",
            "ICMP",
            "IMNMX",
            "ISETP",
            "LEA",
            "LOP3",
            "MOV",
            "P2R",
            "PLOP3",
            "PRMT",
            "R2P",
            "R2UR",
            "SEL",
            "SGXT",
            "SHF",
            "VABSDIFF",
            "VIADD",
            "VIADDMNMX",
            "VIMNMX",
            "VIMNMX3",
        ],
    ),
    (Class::Int, Pipe::Xu, &["FLO", "POPC", "UFLO", "UPOPC"]),
    (
        Class::Int,
        Pipe::Uniform,
        &[
            "UIADD3", "UIMAD", "UISETP", "ULEA", "ULOP3", "UMOV", "UPLOP3", "UPRMT", "USEL",
            "USHF", "UP2UR", "UR2UP", "USGXT",
        ],
    ),
    (Class::Int, Pipe::Constant, &["CS2R", "LDC", "S2R", "S2UR", "ULDC", "B2R", "R2B"]),
    (
        Class::Control,
        Pipe::Control,
        &[
            "BAR",
            "BPT",
            "BRA",
            "BREAK",
            "BRX",
            "BSSY",
            "BSYNC",
            "CALL",
            "CGAERRBAR",
            "DEPBAR",
            "ENDCOLLECTIVE",
            "ERRBAR",
            "EXIT",
            "ACQBULK",
            "KILL",
            "LDGDEPBAR",
            "MEMBAR",
            "NOP",
            "PREEXIT",
            "RET",
            "WARPSYNC",
            "YIELD",
            "NANOSLEEP",
        ],
    ),
];

/// Counts the instructions of a trip by class.
pub(super) fn count(trip: &[&Instruction]) -> Result<BTreeMap<Class, u32>> {
    let mut counts = BTreeMap::new();
    for one in trip {
        *counts.entry(cost(one)?.class).or_default() += 1;
    }
    Ok(counts)
}

/// Cycles of the tensor pipe for an `mma.m16n8k16`.
pub(super) const TENSOR_CYCLES: f64 = 6.6;

/// Trips that are simulated; the second half is measured.
const TRIPS: u32 = 24;

/// Cycles until the instruction at the target of a taken branch can issue, besides its stall.
const BRANCH: f64 = 8.0;

/// Cycles by which an instruction may be issued before its pipe is free, where it has a queue.
const QUEUE: f64 = 6.0;

/// A warp of the simulated scheduler.
struct Warp {
    /// Index of its next instruction.
    at: usize,
    ready: f64,
    scoreboards: [f64; 6],
    trips: u32,
}

/// Returns the cycles of a trip when this number of warps share a scheduler.
pub(super) fn simulate(trip: &[&Instruction], warps: u32) -> Result<f64> {
    let mut costs = Vec::new();
    for (index, one) in trip.iter().enumerate() {
        let next = trip[(index + 1) % trip.len()];
        let jumps = ["BRA", "BRX", "CALL", "RET"].contains(&one.base());
        let is_taken = jumps && Some(next.address) != one.address.checked_add(16);
        costs.push((*one, cost(one)?, if is_taken { BRANCH } else { 0.0 }));
    }
    // Warps start at different times, as they do after waiting for memory.
    let start =
        |index| Warp { at: 0, ready: f64::from(index) * 137.0, scoreboards: [0.0; 6], trips: 0 };
    let mut warps: Vec<Warp> = (0..warps).map(start).collect();
    let mut free: BTreeMap<Pipe, f64> = BTreeMap::new();
    let (mut now, mut last, mut marks) = (0.0_f64, None, Vec::new());
    while warps.iter().any(|warp| warp.trips < TRIPS) {
        let issue = |(index, warp): (usize, &Warp)| {
            let (one, cost, _) = &costs[warp.at];
            let mut at = warp.ready.max(now);
            for scoreboard in 0..SCOREBOARDS {
                if one.control.waits_for >> scoreboard & 1 != 0 {
                    at = at.max(warp.scoreboards[index_of(scoreboard)]);
                }
            }
            let queue = if cost.pipe.is_queued() { QUEUE } else { 0.0 };
            (at.max(free.get(&cost.pipe).copied().unwrap_or(0.0) - queue), index)
        };
        // Of several that are ready, one that is a trip behind, or the one that issued last.
        let order = |a: &(f64, usize), b: &(f64, usize)| {
            let rank = |index: usize| (warps[index].trips, last != Some(index), index);
            a.0.total_cmp(&b.0).then(rank(a.1).cmp(&rank(b.1)))
        };
        let first = warps.iter().enumerate().map(issue).min_by(order);
        let (at, index) = first.context("no warp to simulate")?;
        let warp = &mut warps[index];
        let (one, cost, branch) = &costs[warp.at];
        let begin = at.max(free.get(&cost.pipe).copied().unwrap_or(0.0));
        free.insert(cost.pipe, begin + cost.cycles);
        if cost.pipe == Pipe::FmaHeavy {
            let fma = free.entry(Pipe::Fma).or_default();
            *fma = fma.max(begin + 1.0);
        }
        let queued = cost.pipe.is_queued();
        let done = begin + cost.latency + if queued { cost.cycles } else { 0.0 };
        let read = begin + if queued { 8.0 } else { 4.0 };
        for (scoreboard, time) in
            [(one.control.sets_on_write, done), (one.control.sets_on_read, read)]
        {
            if let Some(scoreboard) = scoreboard {
                let own = &mut warp.scoreboards[index_of(scoreboard)];
                *own = own.max(time);
            }
        }
        warp.ready = at + f64::from(one.control.stall.max(1)) + branch;
        now = at + 1.0;
        last = Some(index);
        warp.at += 1;
        if warp.at == costs.len() {
            warp.at = 0;
            warp.trips += 1;
            if index == 0 {
                marks.push(at);
            }
        }
    }
    let half = marks.len() / 2;
    let trips = u32::try_from(marks.len() - 1 - half)?;
    Ok((marks[marks.len() - 1] - marks[half]) / f64::from(trips))
}

fn index_of(scoreboard: u32) -> usize {
    usize::try_from(scoreboard).unwrap_or_default()
}
