//! Unwrapping of values that only a bug of this workspace could leave empty.

/// Turns a broken invariant into a panic that names it.
///
/// Never used for the caller's input, which is refused with a typed error.
pub trait Invariant<T> {
    /// Returns the value; `holds` states the invariant.
    ///
    /// # Panics
    /// If there is no value.
    fn invariant(self, holds: &str) -> T;
}

impl<T> Invariant<T> for Option<T> {
    #[inline]
    #[track_caller]
    fn invariant(self, holds: &str) -> T {
        match self {
            Some(value) => value,
            None => broken(holds),
        }
    }
}

impl<T, E> Invariant<T> for Result<T, E> {
    #[inline]
    #[track_caller]
    fn invariant(self, holds: &str) -> T {
        self.ok().invariant(holds)
    }
}

#[cold]
#[inline(never)]
#[track_caller]
fn broken(holds: &str) -> ! {
    unreachable!("broken invariant: {holds}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "broken invariant: a row has an owner")]
    fn a_missing_value_names_the_invariant() {
        None::<u32>.invariant("a row has an owner");
    }

    #[test]
    fn a_value_is_returned() {
        assert_eq!(Some(3).invariant("there is one"), 3);
        assert_eq!(Ok::<_, ()>(4).invariant("there is one"), 4);
    }
}
