//! Assembled sources, parsed and validated as drivers would do it.
use std::collections::BTreeSet;

use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};

use super::grammar;
use super::*;
use crate::op::kernels;
use crate::pipelines::Kernel;
use crate::subgroups;

/// Parses and validates WGSL, specialised by these constants, for a device with these features.
fn validate(
    source: &str,
    constants: &[(&'static str, u32)],
    features: Capabilities,
) -> Result<(), String> {
    let module =
        naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let mut validator = Validator::new(ValidationFlags::all(), features);
    validator
        .subgroup_stages(ShaderStages::COMPUTE)
        .subgroup_operations(SubgroupOperationSet::all());
    let info = validator.validate(&module).map_err(|error| error.emit_to_string(source))?;
    let given: naga::back::PipelineConstants =
        constants.iter().map(|(name, value)| ((*name).to_owned(), f64::from(*value))).collect();
    for entry in &module.entry_points {
        let point = Some((entry.stage, entry.name.as_str()));
        naga::back::pipeline_constants::process_overrides(&module, &info, point, &given)
            .map_err(|error| format!("{}: {error}", entry.name))?;
    }
    Ok(())
}

/// Returns the flags of a kernel on a device with or without subgroups.
fn flags(kernel: &Kernel, has_subgroups: bool) -> Vec<&'static str> {
    let more = has_subgroups.then_some(subgroups::FLAG);
    kernel.flags.iter().copied().chain(more).collect()
}

#[test]
fn every_specialisation_is_valid() {
    let mut count = 0_u32;
    for kernel in kernels() {
        let variants = [(false, Capabilities::empty()), (true, Capabilities::SUBGROUP)];
        for (has_subgroups, features) in variants {
            let source = source(kernel.shader, &flags(&kernel, has_subgroups)).unwrap();
            let checked = validate(&source, &kernel.constants, features);
            assert!(checked.is_ok(), "{kernel:?}: {}", checked.unwrap_err());
            count += 1;
        }
    }
    let probe = source(subgroups::PROBE, &[]).unwrap();
    assert!(validate(&probe, &[], Capabilities::SUBGROUP).is_ok());
    assert!(validate(&probe, &[], Capabilities::empty()).is_err(), "the feature is needed");
    assert!(count > 0);
}

#[test]
fn operators_have_the_brackets_that_browsers_require() {
    let mut seen = BTreeSet::new();
    for kernel in kernels() {
        for has_subgroups in [false, true] {
            let flags = flags(&kernel, has_subgroups);
            if seen.insert((kernel.shader, flags.clone())) {
                let source = source(kernel.shader, &flags).unwrap();
                assert_eq!(grammar::first_mixed(&source), None, "{}\n{source}", kernel.shader);
            }
        }
    }
}

#[test]
fn errors_name_the_file() {
    assert!(source("nowhere.wgsl", &[]).unwrap_err().contains("nowhere.wgsl"));
    let wrong = "fn f() -> u32 { return 1.5; }";
    assert!(validate(wrong, &[], Capabilities::empty()).is_err());
}

#[test]
fn every_file_is_used() {
    let both = |kernel: Kernel| {
        [false, true].map(|has| source(kernel.shader, &flags(&kernel, has)).unwrap()).concat()
    };
    let all = kernels().into_iter().map(both).chain([source(subgroups::PROBE, &[]).unwrap()]);
    let all: String = all.collect();
    for (name, text) in FILES {
        let line = text.lines().find(|line| line.starts_with("fn ") && !line.contains('$'));
        if let Some(line) = line {
            assert!(all.contains(line), "{name}: {line}");
        }
    }
}

/// Extracts the numbers with a decimal point from a text, in order.
fn numbers(text: &str) -> Vec<f32> {
    let words = text.split(|c: char| !c.is_ascii_digit() && c != '.');
    words.filter(|word| word.contains('.')).filter_map(|word| word.parse().ok()).collect()
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
    let from = text.split_once(begin).unwrap().1;
    from.split_once(end).unwrap().0
}

#[test]
fn levels_are_equal_in_encoder_and_decoder() {
    let file = |name| FILES.iter().find(|(file, _)| *file == name).unwrap().1;
    let books = numbers(between(file("codes.wgsl"), "array<f32, 44>(", ");"));
    let nearest = file("nearest.wgsl");
    let first = numbers(between(nearest, "let least =", ";"));
    for (bits, begin, first) in [(3, 0, first[2]), (4, 4, first[1]), (6, 12, first[0])] {
        let name = if bits == 6 { "default: {".to_owned() } else { format!("case {bits}u: {{") };
        let book = &books[begin..][..1 << (bits - 1)];
        assert_eq!(first.to_bits(), book[0].to_bits(), "{bits} bits");
        let steps = numbers(between(nearest, &name, "}"));
        let expected: Vec<f32> =
            book.windows(2).flat_map(|pair| [(pair[0] + pair[1]) * 0.5, pair[1]]).collect();
        assert_eq!(steps, expected, "{bits} bits");
    }
}
