//! Chooses how much of a case runs. With [`SHORT`], which is for devices that run on a CPU, a case
//! of many combinations takes fewer of them, other ones for each format, and random cases take
//! fewer runs; cases over quantised formats take a third of them.

/// Variable that shortens cases, with any value but `0`.
const SHORT: &str = "KV_CONFORMANCE_SHORT";

/// Part of the runs of a random case that a short one keeps.
const PART: u32 = 4;

pub(crate) fn is_short() -> bool {
    std::env::var_os(SHORT).is_some_and(|value| value != "0")
}

/// Returns the number of runs of a random case: all, or a part of them.
pub(crate) fn runs(all: u32) -> u32 {
    if is_short() { all.div_ceil(PART) } else { all }
}

/// Chooses among the combinations of a case.
#[derive(Debug)]
pub(crate) struct Rotation {
    is_short: bool,
    next: usize,
}

impl Rotation {
    pub(crate) fn new() -> Self {
        Self { is_short: is_short(), next: 0 }
    }

    /// Returns all combinations, or one of them: the next one at each call.
    pub(crate) fn of<T: Copy>(&mut self, all: &[T]) -> Vec<T> {
        if !self.is_short {
            return all.to_vec();
        }
        let one = all.get(self.next % all.len().max(1));
        self.next += 1;
        one.into_iter().copied().collect()
    }

    /// Starts another row of a table whose columns are as many as the combinations, so that a short
    /// case does not take the same combination for a column in every row.
    pub(crate) fn turn(&mut self) {
        self.next += 1;
    }
}

/// Returns every pair.
pub(crate) fn pairs<A: Copy, B: Copy>(first: &[A], second: &[B]) -> Vec<(A, B)> {
    first.iter().flat_map(|a| second.iter().map(move |b| (*a, *b))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_case_reaches_every_combination_after_as_many_formats() {
        let combinations = pairs(&[1, 2], &['a', 'b']);
        assert_eq!(combinations, [(1, 'a'), (1, 'b'), (2, 'a'), (2, 'b')]);
        let mut short = Rotation { is_short: true, next: 0 };
        let chosen: Vec<_> = (0..4).flat_map(|_| short.of(&combinations)).collect();
        assert_eq!(chosen, combinations);
        assert_eq!(short.of::<u8>(&[]), [0; 0]);
        let mut table = Rotation { is_short: true, next: 0 };
        let row = |table: &mut Rotation| {
            let row = [0, 1, 2].map(|_| table.of(&['a', 'b', 'c'])[0]);
            table.turn();
            row
        };
        let rows = [0, 1, 2].map(|_| row(&mut table));
        assert_eq!(rows, [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b']]);
        let mut long = Rotation { is_short: false, next: 0 };
        assert_eq!(long.of(&combinations), combinations);
    }
}
