//! Constants of GPU kernels, read from the text of their sources.
use std::collections::BTreeMap;

use kv_core::KvFormat;

/// Reads the constants of a C++ header (`NAME = 1`) or of a WGSL file (`const NAME: u32 = 1u`).
pub fn kernel_constants(source: &str) -> BTreeMap<&str, u32> {
    let code = source.lines().map(|line| line.split("//").next().unwrap_or_default());
    let statements = code.flat_map(|line| line.split([',', ';', '{', '}']));
    let constants = statements.filter_map(|statement| {
        let (name, number) = statement.split_once('=')?;
        let name = name.trim().strip_prefix("const ").unwrap_or(name);
        let name = name.split(':').next()?.trim();
        let number = number.trim();
        let number = number.strip_suffix('u').unwrap_or(number).parse().ok()?;
        Some((name, number))
    });
    constants.collect()
}

/// Compares the stored formats that a backend passes to kernels with the constants called
/// `<prefix><name>`: each format has its own, and no constant belongs to another format.
///
/// # Panics
/// If they differ.
pub fn assert_kernel_formats(source: &str, prefix: &str, formats: &[KvFormat]) {
    let constants = kernel_constants(source).into_iter();
    let found: BTreeMap<_, _> =
        constants.filter_map(|(name, number)| Some((name.strip_prefix(prefix)?, number))).collect();
    let expected: BTreeMap<_, _> = formats.iter().map(|format| format.kernel_constant()).collect();
    assert_eq!(found, expected, "constants of kernels, and those that the host passes");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_both_languages_are_read() {
        let header = "enum E : u32 { A = 0, B_2 = 17 };  // C = 3\nconst u32 x = f(y);";
        assert_eq!(kernel_constants(header), BTreeMap::from([("A", 0), ("B_2", 17)]));
        let shader = "const FMT_A: u32 = 4u;\nconst PI: f32 = 3.14;\nlet b = a;";
        assert_eq!(kernel_constants(shader), BTreeMap::from([("FMT_A", 4)]));
    }

    #[test]
    #[should_panic(expected = "constants of kernels")]
    fn a_constant_without_a_format_is_an_error() {
        assert_kernel_formats("enum { FMT_F32 = 0, FMT_NEW = 21 };", "FMT_", &[KvFormat::F32]);
    }
}
