//! The flags of the test binary itself, taken out before libtest's are parsed.
use std::path::PathBuf;

use libtest_mimic::Arguments;

/// The parsed command line.
#[derive(Debug)]
pub(super) struct Args {
    pub(super) libtest: Arguments,
    pub(super) vectors: Vec<PathBuf>,
    pub(super) backend: Option<String>,
}

impl Args {
    pub(super) fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let (mut rest, mut vectors, mut backend) = (Vec::new(), Vec::new(), None);
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let (flag, inline) = match arg.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (arg.clone(), None),
            };
            if flag != "--vectors" && flag != "--backend" {
                rest.push(arg);
                continue;
            }
            let value = inline.or_else(|| args.next());
            let value = value.filter(|value| !value.is_empty());
            let value = value.ok_or_else(|| format!("{flag} needs a value"))?;
            if flag == "--vectors" {
                vectors.push(PathBuf::from(value));
            } else {
                backend = Some(value);
            }
        }
        Ok(Self { libtest: Arguments::from_iter(rest), vectors, backend })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Args, String> {
        Args::parse(std::iter::once("test").chain(args.iter().copied()).map(str::to_owned))
    }

    #[test]
    fn takes_its_own_flags_and_leaves_the_rest() {
        let args =
            parse(&["--vectors", "a", "--vectors=b", "--backend", "cpu", "attend", "--exact"]);
        let args = args.unwrap();
        assert_eq!(args.vectors, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!(args.backend.as_deref(), Some("cpu"));
        assert_eq!(args.libtest.filter.as_deref(), Some("attend"));
        assert!(args.libtest.exact);
    }

    #[test]
    fn a_flag_without_a_value_is_refused() {
        assert!(parse(&["--vectors"]).unwrap_err().contains("--vectors"));
        assert!(parse(&["--backend="]).is_err());
    }
}
