//! Sources put together from files, parsed and validated as drivers would get them.
use naga::valid::{Capabilities, ValidationFlags, Validator};

use super::*;
use crate::op::kernels;

/// Parses and validates WGSL, specialised by these constants.
fn validate(source: &str, constants: &[(&'static str, u32)]) -> Result<(), String> {
    let module =
        naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
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

#[test]
fn every_specialisation_is_valid() {
    let mut count = 0_u32;
    for kernel in kernels() {
        let source = source(kernel.shader, kernel.flags).unwrap();
        let checked = validate(&source, &kernel.constants);
        assert!(checked.is_ok(), "{kernel:?}: {}", checked.unwrap_err());
        count = count.saturating_add(1);
    }
    assert!(count > 0);
}

#[test]
fn mistakes_are_named() {
    assert!(source("nowhere.wgsl", &[]).unwrap_err().contains("nowhere.wgsl"));
    assert!(validate("fn f() -> u32 { return 1.5; }", &[]).is_err());
}

#[test]
fn every_file_is_used() {
    let all: String =
        kernels().into_iter().map(|kernel| source(kernel.shader, kernel.flags).unwrap()).collect();
    for (name, text) in FILES {
        let line = text.lines().find(|line| line.starts_with("fn ") && !line.contains('$'));
        if let Some(line) = line {
            assert!(all.contains(line), "{name}: {line}");
        }
    }
}
