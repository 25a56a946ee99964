//! Tests of the gate: on the disassembly of `tables.cu`, and on small kernels of its lines.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::cubin::{Resources, resources};
use super::family::{Family, Format, Plain, Shape, defined};
use super::figures::{self, Figures};
use super::flow::Flow;
use super::pipes::{self, Class};
use super::sass::{self, Kernel};
use super::trip::{Pass, Work, find};
use super::{figures_of, limits, order};

const TABLES: &str = include_str!("../../testdata/gate/tables.sass");
const UNIT: &[u8] = include_bytes!("../../testdata/gate/tables.cubin");

/// Writes a kernel as the disassembler does. Lines are labels, which end in a colon, or
/// instructions; each waits two cycles.
fn disassembly(name: &str, lines: &[String]) -> String {
    let mut text = format!("\t.section\t.text.{name},\"ax\",@progbits\n\t.align\t128\n");
    let mut address = 0;
    for line in lines {
        if line.ends_with(':') {
            let _ = writeln!(text, "{line}");
            continue;
        }
        let _ = writeln!(text, "        /*{address:04x}*/   {line} ;  /* 0x0000000000000000 */");
        let _ = writeln!(text, "                 /* 0x000fc40000000000 */");
        address += 16;
    }
    text
}

fn lines(text: &str) -> Vec<String> {
    text.split('|').map(|line| line.trim().to_owned()).collect()
}

/// Returns a loop as that of `decode_bf16_64`: K in one branch, V in the other.
fn decode(extra: &str) -> Vec<String> {
    let repeat = |line: &str, count: usize| vec![line.to_owned(); count];
    let mut all = lines("S2R R0, SR_TID.X | MOV R1, R0 | .L_head: | DEPBAR.LE SB0, 0x5");
    all.extend(repeat("LDGSTS.E.BYPASS.128 [R2], [R4]", 8));
    all.extend(lines(&format!("{extra}@P0 BRA `(.L_v)")));
    all.extend(lines("LDG.E.CONSTANT R3, [R6]"));
    all.extend(repeat("HMMA.16816.F32.BF16 R8, R12, R16, R8", 16));
    all.extend(repeat("MUFU.EX2 R20, R20", 16));
    all.extend(lines("@P1 BRA `(.L_head) | BRA `(.L_end) | .L_v:"));
    all.extend(repeat("HMMA.16816.F32.BF16 R8, R12, R16, R8", 16));
    all.extend(lines("@P1 BRA `(.L_head) | .L_end: | STG.E [R2], R8 | EXIT"));
    all
}

fn shape() -> Shape {
    Shape { family: Family::Decode(Format::Plain(Plain::Bf16)), head_dim: 64 }
}

const RESOURCES: Resources = Resources { registers: 190, shared_bytes: 1024 };

fn figures(lines: &[String]) -> anyhow::Result<Vec<Figures>> {
    let kernels = sass::parse(&disassembly("decode_bf16_64", lines))?;
    let known = BTreeMap::from([("decode_bf16_64".to_owned(), RESOURCES)]);
    figures_of(&[shape()].into(), &kernels, &known)
}

#[track_caller]
fn refused(lines: &[String], words: &[&str]) {
    let error = format!("{:#}", figures(lines).unwrap_err());
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

fn tables() -> Kernel {
    sass::parse(TABLES).unwrap().remove(0)
}

#[test]
fn instructions_are_parsed_with_their_control_codes() {
    let kernel = tables();
    assert_eq!((kernel.name.as_str(), kernel.instructions.len()), ("update_tables", 32));
    let load = &kernel.instructions[12];
    assert_eq!((load.address, load.opcode.as_str()), (0xc0, "LDG.E"));
    assert_eq!((load.base(), load.operands.as_str()), ("LDG", "R5, desc[UR4][R2.64]"));
    // The load sets a scoreboard, and the address from it, four instructions on, waits for that.
    let scoreboard = load.control.sets_on_write.unwrap();
    let address = &kernel.instructions[16];
    assert_eq!(address.opcode, "IMAD.WIDE.U32");
    assert_ne!(address.control.waits_for >> scoreboard & 1, 0);
    assert_eq!(address.control.sets_on_write, None);
    assert!(kernel.instructions.iter().all(|one| one.control.stall <= 15));
    let branch = &kernel.instructions[18];
    assert!(branch.is_predicated && branch.base() == "BRA");
    assert_eq!(kernel.instructions[11].labels, [".L_x_0"]);
}

#[test]
fn blocks_have_their_edges() {
    let kernel = tables();
    let flow = Flow::new(&kernel).unwrap();
    let lengths: Vec<u32> = flow.blocks.iter().map(super::flow::Block::len).collect();
    assert_eq!(lengths, [6, 1, 4, 8, 1, 1, 11]);
    let next: Vec<&[usize]> = flow.blocks.iter().map(|block| block.next.as_slice()).collect();
    assert_eq!(next, [&[1][..], &[2], &[3], &[3, 4], &[], &[5], &[]]);
    let exits: Vec<bool> = flow.blocks.iter().map(|block| block.exits).collect();
    assert_eq!(exits, [false, true, false, false, true, false, false]);
}

#[test]
fn indirect_branches_calls_and_predicates_have_edges() {
    let kernel = |text: &str| sass::parse(&disassembly("x", &lines(text))).unwrap().remove(0);
    let next = |text: &str| -> Vec<Vec<usize>> {
        let kernel = kernel(text);
        Flow::new(&kernel).unwrap().blocks.into_iter().map(|block| block.next).collect()
    };
    let indirect = "BRX R2 -0x10 (*\"BRANCH_TARGETS .L_1,.L_2\"*) | .L_1: | EXIT | .L_2: | EXIT";
    assert_eq!(next(indirect), [vec![1, 2], vec![], vec![]]);
    // A branch by an operand, and one for lanes that have diverged, may not be taken.
    for branch in ["BRA !P1, `(.L_1)", "BRA UP0, `(.L_1)", "BRA.DIV UR4, `(.L_1)"] {
        assert_eq!(next(&format!("{branch} | EXIT | .L_1: | EXIT")), [vec![2, 1], vec![], vec![]]);
    }
    // A call is one step.
    let call = "CALL.REL.NOINC `(f) | EXIT | f: | RET.REL.NODEC R2 `(x)";
    assert_eq!(next(call), [vec![1], vec![], vec![]]);
    for (text, word) in [
        ("BRA `(.L_9) | EXIT", ".L_9"),
        ("BRA R2 | EXIT", "to no label"),
        ("BRX R2 -0x10 | EXIT", "to no list"),
        ("MOV R1, R2", "ends here"),
        ("JMP R2 | EXIT", "jump"),
    ] {
        let error = Flow::new(&kernel(text)).unwrap_err();
        assert!(format!("{error:#}").contains(word), "{text}: {error:#}");
    }
}

#[test]
fn the_main_loop_is_the_shortest_walk_that_does_the_work() {
    let found = &figures(&decode("")).unwrap()[0];
    // Two passes share the head of 10 instructions.
    assert_eq!(found.instructions, 10 + 34 + 10 + 17);
    assert_eq!(found.code_bytes, (10 + 34 + 17) * 16);
    assert_eq!((found.before, found.after), (2, 10 + 17 + 2));
    let count = |class| found.count(class);
    assert_eq!((count(Class::Hmma), count(Class::Ldgsts), count(Class::Mufu)), (32, 16, 16));
    assert_eq!((count(Class::Ldg), count(Class::Stg)), (1, 0));
    assert_eq!(found.bytes, 8192);
    assert!(found.cycles > found.cycles_alone, "{found:?}");
    assert_eq!(limits::problems(std::slice::from_ref(found)), [""; 0]);
}

/// An inner loop is entered as often as the work needs, and a longer path is left out.
#[test]
fn inner_loops_are_repeated() {
    let text = "MOV R1, R2 | .L_0: | BRA P0, `(.L_1) | MOV R3, R4 | MOV R5, R6 | .L_1: \
                | HMMA.16816.F32 R8, R12, R16, R8 | @P1 BRA `(.L_1) | @P2 BRA `(.L_0) | EXIT";
    let kernel = sass::parse(&disassembly("x", &lines(text))).unwrap().remove(0);
    let flow = Flow::new(&kernel).unwrap();
    let pass =
        |products| Pass { work: vec![(Work::Product, products)], is_without_exponentials: false };
    // The walk around the inner loop alone is the shortest for one product.
    assert_eq!(find(&flow, &[pass(1)]).unwrap().instructions.len(), 2);
    let error = find(&flow, &[pass(1), Pass { work: vec![(Work::AsyncCopy, 1)], ..pass(1) }]);
    assert!(format!("{:#}", error.unwrap_err()).contains("no main loop"));
}

#[test]
fn planted_regressions_fail() {
    // A spill in the loop, a product of another kind, more code than the cache has.
    for (extra, word) in [
        ("STL [R1], R2 | LDL R2, [R1] | ", "4 local"),
        ("IMMA.16832.S8.S8 R4, R8, R12, R4 | ", "2 IMMA"),
        (&*"IADD3 R4, R4, R5, RZ | ".repeat(1000), "bytes of code in the loop"),
        (&*"F2F.F32.F16 R4, R4 | ".repeat(300), "of the memory's time"),
    ] {
        let found = figures(&decode(extra)).unwrap();
        let problems = limits::problems(&found);
        assert!(problems.iter().any(|problem| problem.contains(word)), "{word}: {problems:?}");
        assert!(problems.iter().all(|problem| problem.starts_with("decode_bf16_64: ")));
    }
    let mut found = figures(&decode("")).unwrap();
    found[0].resources.shared_bytes = 4096;
    assert!(limits::problems(&found)[0].contains("4096 bytes of static shared memory"));
    // A kernel that is compared with another one, slower than it or alone.
    let mut slow = vec![found[0].clone(), found[0].clone()];
    for (one, name) in slow.iter_mut().zip(["prefill_bf16_64", "prefill_l4_64"]) {
        one.shape = Shape::parse(name).unwrap().remove(0);
    }
    slow[1].cycles *= 2.0;
    let problems = limits::problems(&slow);
    let of_bf16 = "prefill_l4_64: 2.00 of the time of prefill_bf16_64, at most 1.60";
    assert!(problems.iter().any(|problem| problem.contains(of_bf16)), "{problems:?}");
    let problems = limits::problems(&slow[1..]);
    assert!(problems.iter().any(|problem| problem.contains("no prefill_bf16_64 to compare")));
    // A kernel for which nobody has set limits.
    found[0].shape.head_dim = 112;
    assert!(limits::problems(&found).iter().any(|problem| problem.contains("0 limits")));
}

#[test]
fn a_missing_loop_or_kernel_fails_by_name() {
    let without = |word: &str| -> Vec<String> {
        decode("").into_iter().filter(|line| !line.starts_with(word)).collect()
    };
    for word in ["LDGSTS", "HMMA", "MUFU", "DEPBAR", "LDG.E", "@P1 BRA"] {
        refused(&without(word), &["decode_bf16_64", "no main loop"]);
    }
    let kernels = sass::parse(&disassembly("decode_bf16_80", &decode(""))).unwrap();
    let error = figures_of(&[shape()].into(), &kernels, &BTreeMap::new()).unwrap_err();
    assert!(error.to_string().contains("decode_bf16_80: not in the sources"), "{error}");
    assert!(error.to_string().contains("decode_bf16_64: not in the archive"), "{error}");
    let kernels = sass::parse(&disassembly("decode_bf16_64", &decode(""))).unwrap();
    let error = figures_of(&[shape()].into(), &kernels, &BTreeMap::new()).unwrap_err();
    assert!(error.to_string().contains("decode_bf16_64: its registers"), "{error}");
}

#[test]
fn unknown_instructions_fail_by_name() {
    refused(&decode("HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 | "), &["HGMMA.64x128x16", "0xb0"]);
    refused(&decode("WOBBLE R1, R2 | "), &["decode_bf16_64", "unknown instruction WOBBLE"]);
}

#[test]
fn hostile_text_is_refused_by_line() {
    let text = disassembly("x", &lines("MOV R1, R2 | EXIT"));
    assert!(sass::parse(&text).is_ok());
    for (from, to, words) in [
        ("/*0010*/", "/*0020*/", "does not follow"),
        ("/*0010*/", "/*zz*/", "no address"),
        ("MOV R1, R2", "@P0", "predicate alone"),
        ("MOV R1", "mov R1", "no opcode"),
        ("/* 0x0000000000000000 */", "/* 0x00 */", "no word"),
        ("/* 0x0000000000000000 */", "", "without its word"),
        ("\t.align", "wobble", "not understood"),
    ] {
        let changed = text.replacen(from, to, 1);
        let error = format!("{:#}", sass::parse(&changed).unwrap_err());
        assert!(error.contains(words) && error.contains("x, line"), "{to}: {error}");
    }
    assert!(sass::parse("").is_err() && sass::parse("\t.section\t.text.x,\"ax\"\n").is_err());
    // Cut anywhere, the text is parsed or refused.
    let mut refused = 0;
    for end in (0..TABLES.len()).step_by(7) {
        match sass::parse(&TABLES[..end]) {
            Ok(kernels) => assert_eq!(kernels.len(), 1),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn units_tell_registers_and_shared_memory() {
    let found = resources(UNIT).unwrap();
    assert_eq!(found.len(), 1);
    let own = found["update_tables"];
    assert!(own.registers > 8 && own.registers < 64, "{own:?}");
    for end in 0..UNIT.len() {
        if let Ok(found) = resources(&UNIT[..end]) {
            assert!(found.len() <= 1);
        }
    }
    let mut damaged = UNIT.to_vec();
    for at in 0..damaged.len() {
        damaged[at] ^= 0xff;
        let _ = resources(&damaged);
        damaged[at] ^= 0xff;
    }
}

/// Issue alone takes a cycle; products take the tensor pipe, of which warps share one.
#[test]
fn the_simulation_is_limited_by_pipes() {
    let kernel = |line: &str| {
        let text = vec![line.to_owned(); 100];
        sass::parse(&disassembly("x", &text)).unwrap().remove(0)
    };
    let cycles = |line: &str, warps| {
        let kernel = kernel(line);
        pipes::simulate(&kernel.instructions.iter().collect::<Vec<_>>(), warps).unwrap() / 100.0
    };
    let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.1;
    // The control code of these lines stalls for two cycles.
    assert!(near(cycles("FADD R1, R2, R3", 1), 2.0));
    assert!(near(cycles("FADD R1, R2, R3", 2), 2.0));
    assert!(near(cycles("HMMA.16816.F32 R8, R12, R16, R8", 1), 6.6));
    assert!(near(cycles("HMMA.16816.F32 R8, R12, R16, R8", 2), 13.2));
    assert!(near(cycles("MUFU.EX2 R1, R2", 2), 16.0));
    assert!(near(cycles("LDSM.16.M88.4 R4, [R2]", 2), 32.0));
}

#[test]
fn shapes_are_those_of_the_sources() {
    let source = "KV_DECODE(decode_l4_64, X, 64)\nKV_KERNEL(prefill_coded_256, P, 128, 1, f)\n";
    let found: Vec<String> = defined(source).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(found, ["decode_l4_64", "prefill_coded_256"]);
    // A loop for each of its formats.
    let found: Vec<String> = defined("KV_KERNEL(prefill_rows_64, P, 128, 2, f)\n")
        .unwrap()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(found, ["prefill_rows_64 e4m3", "prefill_rows_64 e5m2", "prefill_rows_64 int8"]);
    for name in ["decode_l5_64", "decode_l4_", "decode_l4_7", "prefill_0", "decode_bf16_0"] {
        assert!(Shape::parse(name).is_err(), "{name}");
    }
    let bytes = |name| Shape::parse(name).unwrap()[0].bytes();
    assert_eq!(bytes("decode_bf16_128"), 16_384);
    assert_eq!(bytes("decode_int8_row_128"), 8320);
    assert_eq!(bytes("decode_l4_128"), 4224);
    assert_eq!(bytes("prefill_bf16_128"), 8192);
    assert_eq!(bytes("prefill_codes_128"), 2048);
    assert_eq!(bytes("prefill_rows_64"), 2112);
}

#[test]
fn differences_to_a_document_are_named() {
    let found = figures(&decode("")).unwrap();
    let tables = figures::markdown(&found);
    let empty = "# A\n\n<!-- gate: begin -->\n<!-- gate: end -->\n\nB\n";
    let document = figures::replaced(empty, &tables).unwrap();
    assert!(document.starts_with("# A\n") && document.ends_with("\nB\n"));
    assert_eq!(figures::differences(&document, &tables).unwrap(), [""; 0]);
    assert_eq!(figures::differences(empty, &tables).unwrap(), ["decode_bf16_64 has no row"]);
    let more = figures(&decode("MOV R1, R2 | ")).unwrap();
    let changed = figures::differences(&document, &figures::markdown(&more)).unwrap();
    assert!(changed.len() == 1 && changed[0].starts_with("was | `decode_bf16_64`"), "{changed:?}");
    let gone = figures::differences(&document, &figures::markdown(&[])).unwrap();
    assert_eq!(gone, ["decode_bf16_64 has a row, and no machine code"]);
    assert!(figures::replaced("# A\n", &tables).is_err());
}

#[test]
fn the_wait_comes_before_every_access() {
    let problem = |text: &str| {
        let kernels = sass::parse(&disassembly("copy_blocks", &lines(text))).unwrap();
        order::problem(kernels.first().unwrap()).unwrap_or_default()
    };
    let wait = "LDC R1, c[0x0][0x28] | PREEXIT | ACQBULK | LDG.E R2, [R4] | EXIT";
    assert_eq!(problem(wait), "");
    for (text, words) in [
        ("LDC R1, c[0x0][0x28] | MOV R1, R0", "no ACQBULK"),
        ("PREEXIT | LDG.E.CONSTANT R2, [R4] | ACQBULK | EXIT", "LDG.E.CONSTANT at 0x10"),
        ("@P0 STG.E [R4], R2 | ACQBULK | EXIT", "STG.E at 0x0"),
        ("@P0 ACQBULK | LDG.E R2, [R4] | EXIT", "ACQBULK at 0x0"),
        ("@P0 BRA `(.L_x) | ACQBULK | .L_x: | EXIT", "BRA at 0x0"),
        ("LDG.E R2, [R4] | EXIT", "LDG.E at 0x0"),
    ] {
        assert!(problem(text).contains(words), "{text}: {}", problem(text));
    }
}
