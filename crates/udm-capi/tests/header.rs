//! The header is generated from the source: structures, constants and functions with their
//! comments. `UDM_HEADER=write cargo test -p udm-capi --test header` writes it.

use quote::ToTokens;
use std::fmt::Write;
use std::path::Path;
use syn::{Attribute, Expr, Fields, FnArg, Item, Lit, Meta, ReturnType, Type, UnOp};

const HEAD: &str = r#"/*
 * libudm: the Linux device mapper in user space, in the caller's own threads.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Generated from crates/udm-capi/src. docs/library.md has a complete example.
 *
 * A function that returns int returns 0 or more on success, or a negative errno; udm_error() then has
 * the reason as text. Handles are numbers, like file descriptors; an invalid one is refused with EBADF.
 * All threads may use a context and its devices. Only the thread that opened a core may use the core
 * and its lanes. After a fork the child must open its own context.
 *
 * Strings are UTF-8 and end with a NUL. Each pointer must point to what its function describes. It may
 * be NULL only if that is allowed there, or if the length beside it is 0.
 */
#ifndef UDM_H
#define UDM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif
"#;

const TAIL: &str = "
#ifdef __cplusplus
}
#endif

#endif
";

/// The lines of an item's `///` comment.
fn docs(attributes: &[Attribute]) -> Vec<String> {
    let texts = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(lit) => match &lit.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    texts.collect()
}

fn comment(out: &mut String, indent: &str, attributes: &[Attribute]) {
    match &docs(attributes)[..] {
        [] => {}
        [one] => writeln!(out, "{indent}/* {one} */").unwrap(),
        [first, rest @ ..] => {
            write!(out, "{indent}/* {first}").unwrap();
            rest.iter().for_each(|line| write!(out, "\n{indent}   {line}").unwrap());
            out.push_str(" */\n");
        }
    }
}

/// A declaration of `name` with type `ty`, in C.
fn declared(ty: &Type, name: &str) -> String {
    match ty {
        Type::Ptr(to) => {
            let inner = declared(&to.elem, &format!("*{name}"));
            if to.const_token.is_some() { format!("const {inner}") } else { inner }
        }
        Type::Path(path) => {
            let last = path.path.segments.last().unwrap().ident.to_string();
            let c = match last.as_str() {
                "u32" => "uint32_t",
                "u64" => "uint64_t",
                "i32" => "int32_t",
                "i64" => "int64_t",
                "usize" => "size_t",
                "c_int" => "int",
                "c_char" => "char",
                "c_void" => "void",
                "iovec" => "struct iovec",
                own if own.starts_with("udm_") => &format!("struct {own}"),
                other => panic!("{other} has no form in C here"),
            };
            format!("{c} {name}")
        }
        other => panic!("{} has no form in C here", other.to_token_stream()),
    }
}

fn value(expr: &Expr) -> i128 {
    match expr {
        Expr::Lit(lit) => match &lit.lit {
            Lit::Int(int) => int.base10_parse().unwrap(),
            _ => panic!("no number"),
        },
        Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_)) => -value(&unary.expr),
        Expr::Binary(both) if matches!(both.op, syn::BinOp::Shl(_)) => {
            value(&both.left) << value(&both.right)
        }
        other => panic!("{} has no value here", other.to_token_stream()),
    }
}

fn header(sources: &[&str]) -> String {
    let mut out = HEAD.to_owned();
    for source in sources {
        for item in syn::parse_file(source).unwrap().items {
            write_item(&mut out, &item);
        }
    }
    out + TAIL
}

fn write_item(out: &mut String, item: &Item) {
    match item {
        Item::Const(one) if one.ident.to_string().starts_with("UDM_") => {
            if !docs(&one.attrs).is_empty() {
                out.push('\n');
            }
            comment(out, "", &one.attrs);
            let ending = match one.ty.to_token_stream().to_string().as_str() {
                "u32" => "u",
                "u64" => "ull",
                _ => "",
            };
            writeln!(out, "#define {} ({}{ending})", one.ident, value(&one.expr)).unwrap();
        }
        Item::Struct(one) => {
            out.push('\n');
            comment(out, "", &one.attrs);
            writeln!(out, "struct {} {{", one.ident).unwrap();
            let Fields::Named(fields) = &one.fields else { panic!("fields without names") };
            for field in &fields.named {
                comment(out, "\t", &field.attrs);
                writeln!(out, "\t{};", declared(&field.ty, &field.ident.as_ref().unwrap().to_string()))
                    .unwrap();
            }
            out.push_str("};\n");
        }
        Item::Fn(one) if one.attrs.iter().any(|a| a.to_token_stream().to_string().contains("no_mangle")) => {
            out.push('\n');
            comment(out, "", &one.attrs);
            let arguments = one.sig.inputs.iter().map(|argument| match argument {
                FnArg::Typed(typed) => declared(&typed.ty, &typed.pat.to_token_stream().to_string()),
                FnArg::Receiver(_) => panic!("a method"),
            });
            let arguments: Vec<String> = arguments.collect();
            let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
            let ReturnType::Type(_, given) = &one.sig.output else { panic!("returns nothing") };
            writeln!(out, "{};", declared(given, &format!("{}({arguments})", one.sig.ident))).unwrap();
        }
        _ => {}
    }
}

#[test]
fn the_header_is_what_the_source_says() {
    let made = header(&[include_str!("../src/types.rs"), include_str!("../src/abi.rs")]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/udm.h");
    if std::env::var_os("UDM_HEADER").is_some_and(|word| word == "write") {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(made == kept, "UDM_HEADER=write cargo test -p udm-capi --test header writes include/udm.h again");
    let functions = made.lines().filter(|line| line.ends_with(");") && line.contains("udm_")).count();
    assert!(functions >= 18, "only {functions} functions");
}
