//! Structures and constants of the host equal those of the shaders.
use std::collections::BTreeSet;

use kv_core::backend::kernels::{axes_code, dtype_code};
use kv_core::{Axes, DType};
use naga::{Scalar, TypeInner};

use crate::op::kernels;
use crate::params::{FIELDS, FORMATS};
use crate::shaders;

/// Structures whose shader has another name.
const SHADERS: &[(&str, &str)] =
    &[("MergeParams", "attend_merge.wgsl"), ("StoredParams", "store_rows.wgsl")];

/// Shaders that use the structure of another one.
const SHARED: &[(&str, &str)] = &[
    ("attend_few.wgsl", "AttendParams"),
    ("load_rows.wgsl", "StoredParams"),
    ("stage_tail.wgsl", "WriteParams"),
    ("write_blocks.wgsl", "WriteParams"),
];

/// Name, offset and type of each field.
type Field = (String, u32, String);

/// Returns the shader that declares a structure as `Params`: `BytesParams` is that of `bytes.wgsl`.
/// `None` for nested structures.
fn shader_of(name: &str) -> Option<String> {
    if let Some((_, shader)) = SHADERS.iter().find(|(known, _)| *known == name) {
        return Some((*shader).to_owned());
    }
    Some(format!("{}.wgsl", name.strip_suffix("Params")?.to_lowercase()))
}

fn size(kind: &str) -> u32 {
    match kind {
        "u32" | "f32" => 4,
        name => {
            let (_, fields) = FIELDS.iter().find(|(known, _)| *known == name).unwrap();
            fields.iter().map(|(_, kind)| size(kind)).sum()
        }
    }
}

/// Lays out the fields as `repr(C)` does: all members are words, one after another.
fn host_fields(fields: &[(&str, &str)]) -> Vec<Field> {
    let mut at = 0;
    let place = |(name, kind): &(&str, &str)| {
        let field = ((*name).to_owned(), at, (*kind).to_owned());
        at += size(kind);
        field
    };
    fields.iter().map(place).collect()
}

fn shader_fields(module: &naga::Module, name: &str) -> Option<Vec<Field>> {
    let found = module.types.iter().find(|(_, found)| found.name.as_deref() == Some(name));
    let (_, found) = found?;
    let TypeInner::Struct { members, .. } = &found.inner else { return None };
    let kind = |member: &naga::StructMember| {
        let kind = &module.types[member.ty];
        match kind.inner {
            TypeInner::Scalar(Scalar::U32) => "u32".to_owned(),
            TypeInner::Scalar(Scalar::F32) => "f32".to_owned(),
            _ => kind.name.clone().unwrap_or_default(),
        }
    };
    let field = |member: &naga::StructMember| {
        (member.name.clone().unwrap_or_default(), member.offset, kind(member))
    };
    Some(members.iter().map(field).collect())
}

#[test]
fn fields_have_the_offsets_of_the_shaders() {
    let mut seen = BTreeSet::new();
    for kernel in kernels() {
        let source = shaders::source(kernel.shader, kernel.flags).unwrap();
        let module = naga::front::wgsl::parse_str(&source).unwrap();
        for (name, fields) in FIELDS {
            let expected = host_fields(fields);
            let found = match shader_of(name) {
                Some(shader) if shader == kernel.shader => shader_fields(&module, "Params"),
                Some(_) => continue,
                None => shader_fields(&module, name),
            };
            if let Some(found) = found {
                assert_eq!(found, expected, "{name} in {}", kernel.shader);
                seen.insert(*name);
            }
        }
        let has_params = shader_fields(&module, "Params").is_some();
        let is_known =
            FIELDS.iter().any(|(name, _)| shader_of(name).as_deref() == Some(kernel.shader));
        let shared = SHARED.iter().find(|(shader, _)| *shader == kernel.shader);
        if let Some((shader, name)) = shared {
            let (_, fields) = FIELDS.iter().find(|(known, _)| known == name).unwrap();
            assert_eq!(shader_fields(&module, "Params"), Some(host_fields(fields)), "{shader}");
        }
        assert_eq!(has_params, is_known || shared.is_some(), "{}", kernel.shader);
    }
    let missing: Vec<_> = FIELDS.iter().filter(|(name, _)| !seen.contains(name)).collect();
    assert!(missing.is_empty(), "no shader has {missing:?}");
}

#[test]
fn formats_have_the_numbers_of_the_shaders() {
    let codes = include_str!("../../shaders/codes.wgsl");
    kv_testkit::assert_kernel_formats(codes, "FMT_", FORMATS);
}

#[test]
fn element_types_and_axes_have_the_numbers_of_the_shaders() {
    let constants = kv_testkit::kernel_constants(include_str!("../../shaders/params.wgsl"));
    for (name, dtype) in [("F32", DType::F32), ("F16", DType::F16), ("BF16", DType::Bf16)] {
        assert_eq!(constants.get(name), Some(&dtype_code(dtype)), "{name}");
    }
    // Shaders compare with this value only; strides describe the two other formats.
    assert_eq!(constants.get("THD"), Some(&axes_code(Axes::Thd)));
}
