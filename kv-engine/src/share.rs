//! The split of a step's tokens among sequences: the one place that decides it.
//!
//! 1. Every sequence that decodes gets its one token, because its reader waits for each token.
//! 2. Drafts come next, because a step with them costs little more. While a prompt is to be
//!    computed they get at most half of what is left, so that they never stop it.
//! 3. The rest goes to the prompts by equal shares. What a short one does not need goes to the
//!    others; the remainder of the division goes to the oldest, which have waited longest.

use crate::num::to_u32;

/// The tokens of a step besides one for each sequence that decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rest {
    /// All of them.
    pub(crate) tokens: u32,
    /// Most draft tokens among them.
    pub(crate) drafts_max: u32,
}

/// Returns the rest of `budget` tokens when `decoding` sequences have one token each.
pub(crate) fn after_decoding(budget: u32, decoding: u32, has_prompts: bool) -> Rest {
    let tokens = budget.saturating_sub(decoding);
    let drafts_max = if has_prompts { tokens / 2 } else { tokens };
    Rest { tokens, drafts_max }
}

/// Splits `budget` tokens among prompts that need `needs` tokens, oldest first.
///
/// Each prompt gets its need or at least `budget / needs.len()`, and the sum is the smaller of the
/// budget and the sum of the needs.
pub(crate) fn among_prompts(budget: u32, needs: &[u32]) -> Vec<u32> {
    let mut shares = vec![0; needs.len()];
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|at| needs[*at]);
    // The smallest need first: its leftover raises the share of all others.
    let (mut left, mut others) = (budget, to_u32(order.len()));
    let mut level = 0;
    for at in order {
        level = left / others;
        if needs[at] > level {
            break;
        }
        left -= needs[at];
        others -= 1;
    }
    for (share, need) in shares.iter_mut().zip(needs) {
        *share = level.min(*need);
    }
    // The remainder: fewer tokens than there are prompts without all of theirs.
    let mut left = budget - shares.iter().sum::<u32>();
    for (share, need) in shares.iter_mut().zip(needs) {
        let more = left.min(need - *share);
        *share += more;
        left -= more;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_equal_and_what_is_left_goes_on() {
        let cases: [(u32, &[u32], &[u32]); 9] = [
            (512, &[6000], &[512]),
            (512, &[6000, 6000], &[256, 256]),
            (512, &[6000, 10], &[502, 10]),
            (512, &[10, 6000, 6000], &[10, 251, 251]),
            (512, &[6000, 10, 6000, 200], &[168, 10, 167, 167]),
            (100, &[200, 200, 200], &[34, 33, 33]),
            (3, &[9, 9, 9, 9], &[3, 0, 0, 0]),
            (0, &[9], &[0]),
            (9, &[], &[]),
        ];
        for (budget, needs, expected) in cases {
            assert_eq!(among_prompts(budget, needs), expected, "{budget} {needs:?}");
        }
    }

    #[test]
    fn every_split_keeps_its_promises() {
        let mut random = 1_u32;
        let mut draw = |below: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 16) % below
        };
        for _ in 0..2000 {
            let budget = draw(600);
            let needs: Vec<u32> = (0..=draw(12)).map(|_| draw(300)).collect();
            let shares = among_prompts(budget, &needs);
            let least = budget / u32::try_from(needs.len()).expect("few");
            for (share, need) in shares.iter().zip(&needs) {
                assert!(share <= need && *share >= least.min(*need), "{budget} {needs:?}");
            }
            let sum: u32 = shares.iter().sum();
            assert_eq!(sum, budget.min(needs.iter().sum()), "{budget} {needs:?}");
        }
    }

    #[test]
    fn drafts_leave_half_to_prompts() {
        assert_eq!(after_decoding(512, 12, false), Rest { tokens: 500, drafts_max: 500 });
        assert_eq!(after_decoding(512, 12, true), Rest { tokens: 500, drafts_max: 250 });
        assert_eq!(after_decoding(8, 12, true), Rest { tokens: 0, drafts_max: 0 });
    }
}
