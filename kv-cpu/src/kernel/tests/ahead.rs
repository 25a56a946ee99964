//! How much of what comes next the kernels ask for.
use super::super::ahead::part;
use super::*;
use crate::encoding::RowLayout;

const ROWS_MOST: usize = 7;

/// The part of what comes next that kernels ask for: products with K, then those with V.
fn asked(
    kernels: Kernels,
    memory: &[u8],
    (element, dim): (Element, usize),
    rows: usize,
) -> [f64; 2] {
    let mut runs = Runs::new();
    memory.chunks(memory.len() / 4).for_each(|run| runs.push(run));
    let stride = dim.next_multiple_of(LANES_MAX);
    let layout = RowLayout::plain(element, dim);
    let tile = TileRows::of(memory.chunks(layout.bytes()).take(TILE), layout.bytes());
    let (q, scale) = (vec![0.0; rows * stride], RowScale::Given(1.0));
    let (mut scores, mut out) = (vec![0.0; rows * TILE], vec![0.0; rows * stride]);
    let part = |ahead: &Ahead<'_>| {
        let (left, all) = ahead.turns();
        (all - left) as f64 / all as f64
    };
    let (mut of_k, mut of_v) = (Ahead::of(&runs), Ahead::of(&runs));
    let range = (0, TILE);
    let (k, v, layout) = (&tile, &tile, &layout);
    let mut args = Scores { rows, q: &q, stride, k, layout, scale, range, out: &mut scores };
    kernels.scores(&mut args, &mut of_k);
    let weights = &mut scores;
    let mut args = Sums { rows, weights, v, layout, scale, range, out: &mut out, stride };
    kernels.sums(&mut args, &mut of_v);
    [part(&of_k), part(&of_v)]
}

/// Neither all at once at a length of rows that fills no pass, nor hardly any.
#[test]
fn products_ask_for_their_part() {
    let memory = vec![0_u8; 1 << 20];
    let parts = part::SCORES + part::BEHIND_SCORES;
    let wanted = [part::SCORES, part::SUMS + part::END].map(|part| part as f64 / parts as f64);
    for (name, kernels) in all() {
        for dim in [32, 64, 96, 128, 160, 192, 224, 256] {
            for rows in 1..=ROWS_MOST {
                for element in ELEMENTS {
                    let asked = asked(kernels, &memory, (element, dim), rows);
                    for (asked, wanted) in asked.into_iter().zip(wanted) {
                        let close = wanted * 0.9..wanted * 1.35;
                        assert!(
                            close.contains(&asked),
                            "{name} {element:?} {dim} {rows}: {asked:.3} of {wanted:.3}"
                        );
                    }
                }
            }
        }
    }
}
