//! Moves of devices with several lines or stripes: their table goes into a device of its own, while
//! clients use it, as the refusal says. And what a device keeps that moves: its limits and clients.

mod support;

use std::fs;
use support::moved_disk::{MovedDisk, SIZE, data, read, write};
use support::nbd::Client;
use support::{Server, until};
use udm_wire::nbd::NbdCommand;

const HALF: u64 = SIZE / 1024;

fn serve(disk: &MovedDisk, table: &str) -> Server {
    let device = format!("many={table}");
    Server::start_with(&[&device], &["--state", &disk.word("state2")])
}

/// The commands of a refusal, with the table in the place of `$(udm table many)`.
fn follow_the_way_out(server: &Server, refusal: &str) {
    let table = server.says(&["table", "many"]);
    let commands = refusal.split("udm ").skip(1);
    let mut done = 0;
    for command in commands
        .filter(|command| ["create ", "load ", "resume "].iter().any(|verb| command.starts_with(verb)))
    {
        let end = command.find([';', ')']).filter(|_| !command.contains("$(")).unwrap_or(command.len());
        let command = command[..end].trim_end_matches(['\n', ')', ':', ' ']);
        let (verb, option) = command.split_once(" --table ").unwrap_or((command, ""));
        let mut words: Vec<&str> = verb.split(' ').collect();
        let option = option.trim_matches('"');
        let given = if option.contains("$(") { table.as_str() } else { option };
        if !given.is_empty() {
            words.extend(["--table", given]);
        }
        server.says(&words);
        done += 1;
    }
    assert_eq!(done, 3, "{refusal}");
}

#[test]
fn several_lines_and_stripes_move_by_the_way_out_of_the_refusal() {
    for (at, layout) in ["lines", "stripes"].into_iter().enumerate() {
        let disk = MovedDisk::new();
        let whole = data();
        for (name, half) in [("one", &whole[..SIZE as usize / 2]), ("two", &whole[SIZE as usize / 2..])] {
            fs::write(disk.path(name), half).unwrap();
        }
        let (one, two) = (disk.word("one"), disk.word("two"));
        let table = match layout {
            "lines" => format!("0 {HALF} linear {one} 0\n{HALF} {HALF} linear {two} 0"),
            _ => format!("0 {} striped 2 128 {one} 0 {two} 0", SIZE / 512),
        };
        let server = serve(&disk, &table);
        let mut client = Client::connect(&server.nbd, "many");
        write(&mut client, 4096, 512);
        let before = read(&mut client, 0, 1 << 20);
        let new = disk.word("new");
        let refusal = server.refuses(&["move", "many", "--to", &new]);
        follow_the_way_out(&server, &refusal);
        server.says(&["move", "many", "--to", &new, "--wait"]);
        assert!(read(&mut client, 0, 1 << 20) == before, "{layout}");
        write(&mut client, 8192, 512);
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        assert!(disk.read("new")[8192..8704] == [1; 512] && disk.read("new")[..4096] == before[..4096]);
        drop(client);
        drop(server);
        // The words of before would serve the old content.
        let server = Server::start_with(&[], &["--state", &disk.word("state2")]);
        let error = server.refuses(&["create", "many", "--table", &table]);
        assert!(error.contains("has old data: many was moved from there to"), "{layout}: {error}");
        assert!(error.contains("udm move forget @many-old"), "{error}");
        if at == 0 {
            // Half of the old content is old, too.
            let error = server.refuses(&["create", "half", "--table", &format!("0 8 linear {two} 8")]);
            assert!(error.contains("has old data"), "{error}");
        }
        server.says(&["create", "many", "--table", &new]);
        assert!(read(&mut Client::connect(&server.nbd, "many"), 8192, 512) == [1; 512]);
        server.says(&["move", "forget", "@many-old"]);
        server.says(&["create", "again", "--table", &table]);
    }
}

/// Limits of a device, and its clients over NBD and as a disk of a machine, stay while it moves.
#[test]
fn a_throttled_device_keeps_its_limits_and_clients() {
    let disk = MovedDisk::new();
    disk.server.says(&["throttle", "disk", "iops=2000"]);
    let socket = disk.word("vm.sock");
    disk.server.says(&["vhost-user", "add", "disk", &socket]);
    let mut client = disk.client();
    write(&mut client, 512, 512);
    let list = disk.move_to("new");
    assert_eq!(list["state"], "done");
    write(&mut client, 1024, 512);
    assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
    assert!(disk.read("new")[512..1536] == [1; 1024]);
    let limits = disk.server.says(&["throttle", "disk"]);
    assert!(limits.contains("2000"), "{limits}");
    until("the socket of the machine", || fs::metadata(&socket).ok());
    let metrics = disk.server.http("GET", "/metrics", "").2;
    assert!(!metrics.contains("udm_move_bytes{"), "it is over");
    disk.begin(&disk.word("third"));
    let metrics = disk.server.http("GET", "/metrics", "").2;
    assert!(metrics.contains(&format!("udm_move_bytes{{device=\"disk\"}} {SIZE}")), "{metrics}");
    assert!(metrics.contains("udm_move_copying{device=\"disk\"} 0"), "it is paused: {metrics}");
    assert!(metrics.contains("udm_move_unlogged_bytes{"), "{metrics}");
    let top = disk.server.says(&["top", "--once", "--json"]);
    assert!(top.contains("\"moving\"") && top.contains("paused"), "{top}");
}
