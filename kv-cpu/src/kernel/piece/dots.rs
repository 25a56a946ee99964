//! Products of query rows with the K rows of a piece.
//!
//! As many query values as fit stay in registers while the rows of K pass by, one after another:
//! loads of queries among those of K cost most, and memory gives most in its own order
//! (`docs/performance.md`). What takes long to decode is decoded once instead, for all query rows.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use std::mem::MaybeUninit;

use super::super::simd::{LANES_MAX, LINE, Simd};
use super::super::stored::GROUP;
use super::ask::Ask;
use super::multiply::{Floats, Load, Multiply, Operands, V};
use super::{ROWS_MAX, tokens_of};

/// Sums of the products with a token that are not folded to one lane yet.
type Partial<M> = MaybeUninit<<M as Multiply>::Sums>;

/// Which query rows visit K.
#[derive(Clone, Copy)]
struct Visit {
    row: usize,
    /// How many visits there are.
    of: usize,
    /// The lowest bit of a lane's number that tells rows apart.
    bit: u32,
}

/// Products of `R` query rows with the tokens of a piece, `N` at most: vectors of lanes
/// `row * T + token`, as many as such pieces have, zero where there is no such token. `P` rows meet
/// all of K before the next ones do, and `C` groups of their values.
#[inline(always)]
pub(super) fn dots<
    M: Multiply,
    const R: usize,
    const P: usize,
    const C: usize,
    const N: usize,
    const TWICE: bool,
>(
    m: M,
    x: &Operands<'_>,
    ask: &mut Ask<TWICE>,
) -> [<M::S as Simd>::F; ROWS_MAX] {
    let (all, tokens) = (R.next_power_of_two(), const { tokens_of(R) });
    let (of, whole, bit) = (all / P, R / P, tokens.ilog2());
    let mut partial: [[Partial<M>; N]; ROWS_MAX] = [[MaybeUninit::uninit(); _]; _];
    for visit in 0..whole {
        let sums = &mut partial[visit];
        add_rows::<M, P, P, C, TWICE>(m, x, Visit { row: visit * P, of, bit }, ask, sums);
    }
    let (last, sums) = (Visit { row: whole * P, of, bit }, &mut partial[whole % ROWS_MAX]);
    match R % P {
        0 => {}
        1 => add_rows::<M, P, 1, C, TWICE>(m, x, last, ask, sums),
        _ => add_rows::<M, P, 3, C, TWICE>(m, x, last, ask, sums),
    }
    if x.k.tokens < N {
        for sums in &mut partial[..of] {
            sums[x.k.tokens..].fill(MaybeUninit::new(m.zero()));
        }
    }
    let mut scores = [m.simd().splat(0.0); ROWS_MAX];
    for step in 0..N / tokens {
        // Lanes of rows are above those of tokens, and visits are the highest of a row.
        let mut steps = [m.zero(); LANES_MAX];
        for token in 0..tokens {
            let mut rows = [m.zero(); LANES_MAX];
            for visit in 0..of {
                // SAFETY: each visit has set those of all tokens, and zeros are behind them.
                rows[visit] = unsafe { partial[visit][step * tokens + token].assume_init() };
            }
            steps[token] = fold(m, rows, of, bit + P.ilog2());
        }
        scores[step] = m.scores(x, fold(m, steps, tokens, 0));
    }
    scores
}

/// `R` rows in place of `P` against all of K.
#[inline(always)]
fn add_rows<M: Multiply, const P: usize, const R: usize, const C: usize, const TWICE: bool>(
    m: M,
    x: &Operands<'_>,
    visit: Visit,
    ask: &mut Ask<TWICE>,
    sums: &mut [Partial<M>],
) {
    let groups = x.k.layout.dim() / M::VALUES;
    let mut group = 0;
    while group + C <= groups {
        add_groups::<M, P, R, C, TWICE>(m, x, (visit, group), ask, sums);
        group += C;
    }
    while C > 2 && group + 2 <= groups {
        add_groups::<M, P, R, 2, TWICE>(m, x, (visit, group), ask, sums);
        group += 2;
    }
    if C > 1 && group < groups {
        add_groups::<M, P, R, 1, TWICE>(m, x, (visit, group), ask, sums);
    }
}

/// `C` groups of them from one on, which stay in registers.
#[inline(always)]
fn add_groups<M: Multiply, const P: usize, const R: usize, const C: usize, const TWICE: bool>(
    m: M,
    x: &Operands<'_>,
    (visit, group): (Visit, usize),
    ask: &mut Ask<TWICE>,
    sums: &mut [Partial<M>],
) {
    let mut queries = [[m.query(x, visit.row, group); C]; R];
    for r in 0..R {
        for c in 0..C {
            queries[r][c] = m.query(x, visit.row + r, group + c);
        }
    }
    for token in 0..x.k.tokens {
        let lines = (C * M::BYTES / LINE, M::BYTES > 2 * M::VALUES);
        ask.visit(m.simd(), lines, (visit.row / P, visit.of));
        let from = x.k.first.wrapping_add(token * x.k.stride);
        let mut dots = [[m.zero(); 2]; R];
        for c in 0..C {
            let keys = m.key(x, from, group + c);
            for r in 0..R {
                dots[r] = m.dot(dots[r], (queries[r][c], keys));
            }
        }
        let mut rows = [m.zero(); LANES_MAX];
        for r in 0..R {
            rows[r] = m.add(dots[r][0], dots[r][1]);
        }
        let mut sum = fold(m, rows, P, visit.bit);
        if group > 0 {
            // SAFETY: the first groups have set it.
            sum = m.add(sum, unsafe { sums[token].assume_init() });
        }
        sums[token].write(sum);
    }
}

/// The same where keys take long to decode: once for all rows, `T` tokens side by side. Where there
/// is no such token, but others of its vector, the last one is met once more.
#[inline(always)]
pub(super) fn dots_decoded<L: Load, const R: usize, const T: usize>(
    l: L,
    x: &Operands<'_>,
    ask: &mut Ask<false>,
) -> [V<L>; ROWS_MAX] {
    const { assert!(T == tokens_of(R), "scores share a vector") };
    let s = l.simd();
    let (steps, groups) = (x.k.tokens.div_ceil(T), x.k.layout.dim() / GROUP);
    let pace = ask.pace(steps * groups);
    let mut scores = [s.splat(0.0); ROWS_MAX];
    for step in 0..steps {
        let rows = std::array::from_fn(|t| x.k.at(step * T + t));
        let mut dots = [s.splat(0.0); LANES_MAX];
        for group in 0..groups {
            ask.step(s, pace);
            add_decoded::<L, R, T>(l, x, (&rows, group), &mut dots);
        }
        scores[step] = fold(Floats(l), dots, LANES_MAX, 0);
    }
    scores
}

/// Adds the products of a group of values of the query rows with that of `T` rows of K.
#[inline(always)]
fn add_decoded<L: Load, const R: usize, const T: usize>(
    l: L,
    x: &Operands<'_>,
    (rows, group): (&[*const u8; T], usize),
    dots: &mut [V<L>; LANES_MAX],
) {
    let (s, m) = (l.simd(), Floats(l));
    // What is the shorter of both stays in registers.
    if R <= T {
        let mut queries = [[s.splat(0.0); 2]; R];
        for r in 0..R {
            queries[r] = m.query(x, r, group);
        }
        for t in 0..T {
            let keys = m.key(x, rows[t], group);
            for r in 0..R {
                dots[r * T + t] = s.fma(queries[r][0], keys[0], dots[r * T + t]);
                dots[r * T + t] = s.fma(queries[r][1], keys[1], dots[r * T + t]);
            }
        }
        return;
    }
    let mut keys = [[s.splat(0.0); 2]; T];
    for t in 0..T {
        keys[t] = m.key(x, rows[t], group);
    }
    for r in 0..R {
        let [even, odd] = m.query(x, r, group);
        for t in 0..T {
            dots[r * T + t] = s.fma(even, keys[t][0], dots[r * T + t]);
            dots[r * T + t] = s.fma(odd, keys[t][1], dots[r * T + t]);
        }
    }
}

/// Adds lanes of the first `n` vectors: those that differ in bits from `bit` on, of which the lanes
/// of vector `i` are those that have the bits of `i` there.
#[inline(always)]
fn fold<M: Multiply>(m: M, mut v: [M::Sums; LANES_MAX], n: usize, bit: u32) -> M::Sums {
    for level in (0..n.ilog2()).rev() {
        let half = 1 << level;
        for i in 0..half {
            v[i] = m.fold(bit + level, v[i], v[i + half]);
        }
    }
    v[0]
}
