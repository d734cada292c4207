//! `udm deps` and `udm ls --tree` against a running server.

mod support;

use serde_json::Value;
use support::{Server, text, udm};

#[test]
fn what_lies_on_what() {
    let devices = [
        "base=0 2048 linear mem:1M 0",
        "both=0 32 striped 2 8 @base 0 null:size=1M 0",
        "top=0 8 linear @both 0\n8 8 linear @base 0\n16 8 linear @both 8",
        "none=0 8 zero",
    ];
    let server = Server::start(&devices);
    // In the kernel's order: the last device of a table comes first, and each once.
    assert_eq!(
        server.says(&["deps"]),
        "base: 1 dependencies\t: (253, 0)\nboth: 2 dependencies\t: (253, 1) (254, 0)\n\
         top: 2 dependencies\t: (254, 0) (254, 1)\nnone: 0 dependencies\t:\n"
    );
    assert_eq!(server.says(&["deps", "both"]), "2 dependencies\t: (253, 1) (254, 0)\n");
    server.says(&["rename", "base", "ground"]);
    assert_eq!(
        server.says(&["deps", "-o", "devname", "both"]),
        "2 dependencies\t: (null:size=1M) (ground)\n"
    );
    server.says(&["load", "none", "--table", "0 8 linear @top 0"]);
    assert_eq!(server.says(&["deps", "none"]), "0 dependencies\t:\n");
    assert_eq!(server.says(&["deps", "--inactive", "none"]), "1 dependencies\t: (254, 2)\n");
    let json: Value = serde_json::from_str(&server.says(&["deps", "both", "--json"])).unwrap();
    assert_eq!(json[0]["devices"][1]["uri"], "@ground");
    assert!(server.refuses(&["deps", "nobody"]).contains("No such device"));

    let tree = |locale: &str| {
        let mut ls = udm(&["ls", "--tree"]);
        ls.env("UDM_SOCKET", &server.socket).env_remove("LC_CTYPE").env("LC_ALL", locale);
        text(&ls.output().unwrap().stdout)
    };
    let expected = "top (254:2)\n |-ground (254:0)\n |  `- (253:0)\n `-both (254:1)\n    |- (253:1)\n    \
                  `-ground (254:0)\n       `- (253:0)\nnone (254:3)\n";
    assert_eq!(tree("C"), expected);
    let utf8 = expected.replace("|- ", "├─ ").replace("|-", "├─").replace("`-", "└─").replace('|', "│");
    assert_eq!(tree("C.UTF-8"), utf8);
    let nobody = Server::start(&[]);
    for verb in [["ls", "--tree"], ["deps", "--inactive"]] {
        assert_eq!(nobody.says(&verb), "No devices found\n");
    }
}
