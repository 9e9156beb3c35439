package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/nic"
)

func TestBenchRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	if code := exitCode(fmt.Errorf("bench: %w", bench.ErrNoFigures)); code != ExitUsage {
		t.Errorf("metrics that no scenario has: exit %d, want %d", code, ExitUsage)
	}
	for line, says := range map[string]string{
		"--scenarios native,nonsense":         `there is no scenario "nonsense"; use some of native, route, vxlan, `,
		"--metrics TCP_RR,tcp_crr":            `there is no metric "tcp_crr"; use some of TCP_RR, UDP_RR, `,
		"--scenarios native,":                 `there is no scenario ""; use some of native, `,
		"--metrics ,TCP_RR":                   `there is no metric ""; use some of TCP_RR, `,
		"-o xml":                              "use text, json or a folder; for a folder of that name, use ./xml",
		"-o JSON":                             "use text, json or a folder",
		"--output=":                           "use text, json or a folder; for a folder of that name, use ./results",
		"--scenarios=":                        "--scenarios is empty",
		"--metrics=":                          "--metrics is empty",
		"--quick --full":                      "none of the others can be",
		"--smoke --full --scenarios nonsense": "none of the others can be",
		"nonsense":                            "wrong number of arguments",
		"--peer flannel":                      "use NAME=COMMAND",
		"--peer flannel=":                     "use NAME=COMMAND",
		"--output /dev/null/x":                "not a directory; nothing was measured",
		"--peer ../x=sh":                      "use NAME=COMMAND",
		"--peer x=/nonexistent/x":             "no such file",
		"--peer native=sh":                    "there is a scenario native already",
		"--peer x=sh --peer x=sh":             "there is a scenario x already",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "datapath"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench datapath %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
}

func TestBenchOffloadRefuses(t *testing.T) {
	other := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(other, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for line, says := range map[string]string{
		"--from /nonexistent/report.json": "no such file or directory",
		"--from " + other:                 "is no report of bench offload",
		"--smoke --full":                  "none of the others can be",
		"-o xml":                          "use text, json or a folder",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "offload"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench offload %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
}

func TestBenchCompareRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for line, says := range map[string]string{
		"":                              "wrong number of arguments",
		"/bin/sh x":                     "wrong number of arguments",
		"/nonexistent/pilaster":         "no such file or directory; name a build of this program as a path",
		"nonexistent":                   "name a build of this program as a path",
		"/bin/sh --scenarios netpila,x": `there is no scenario "x"`,
		"/bin/sh --scenarios=":          "--scenarios is empty",
		"/bin/sh --metrics tcp_rr":      `there is no metric "tcp_rr"`,
		"/bin/sh --pairs 5":             "use 6 or more",
		"/bin/sh --at-least 0":          "use a number above 0, at most 1",
		"/bin/sh --at-least NaN":        "use a number above 0, at most 1",
		"/bin/sh --at-least 1.1":        "use a number above 0, at most 1",
		"/bin/sh -o xml":                "use text, json or a folder",
		"/bin/sh --output /dev/null/x":  "nothing was measured",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "compare"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench compare %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	if _, offers, _ := run(t, "", "__complete", "bench", "compare", "/bin/sh", "--metrics",
		"UDP_RR,"); !strings.Contains(
		offers,
		"UDP_RR,UDP_PPS\n",
	) {
		t.Errorf("--metrics UDP_RR,<TAB>: %q, want UDP_RR,UDP_PPS", offers)
	}
}

// A path with a slash is a folder, even if its last element is the name of a format.
func TestReportPlace(t *testing.T) {
	for to, folder := range map[string]bool{"text": false, "json": false, "results": true, "./xml": true,
		"dist/bench": true} {
		var p reportPlace
		if err := p.Set(to); err != nil || p.isFolder() != folder || p.String() != to {
			t.Errorf("%s: %v, isFolder %v, want %v", to, err, p.isFolder(), folder)
		}
	}
	if _, help, _ := run(t, "", "bench", "--help"); !strings.Contains(help, "ONCache") ||
		!strings.Contains(help, "bounds") {
		t.Errorf("help lacks ONCache or bounds: %s", help)
	}
}

// Completion does not offer a scenario that this kernel does not support. If the user names such a scenario, the
// command fails before it measures.
func TestBenchLeavesOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	lacks := device.HasNetkit()
	_, offers, _ := run(t, "", "__complete", "bench", "datapath", "--scenarios", "")
	for _, name := range []string{"bound-netkit", "netpila-netkit"} {
		if strings.Contains("\n"+offers, "\n"+name+"\n") != (lacks == nil) {
			t.Errorf("HasNetkit: %v; offered: %q", lacks, offers)
		}
		if lacks == nil {
			continue
		}
		code, out, errs := run(t, "", "bench", "datapath", "--scenarios", "native,"+name)
		if want := "--scenarios: " + name + ": this kernel has no netkit"; code != ExitUsage ||
			!strings.Contains(errs, want) ||
			out != "" {
			t.Errorf("exit %d, stdout %q, stderr %q, want %q", code, out, errs, want)
		}
	}
}

func TestBenchCheckRefuses(t *testing.T) {
	for line, says := range map[string]string{"--rounds 0": "use 6 or more", "--rounds 5": "an interval needs as " +
		"many", "-o yaml": "text or json", "x": "wrong number of arguments"} {
		code, _, errs := run(t, "", append([]string{"bench", "check"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) {
			t.Errorf("bench check %s: exit %d, stderr %q; want exit %d, stderr with %q",
				line, code, errs, ExitUsage, says)
		}
	}
}

// Completion offers each name once, also after a comma.
func TestBenchCompletion(t *testing.T) {
	for _, c := range []struct {
		flag, typed string
		offers      []string
		not         string
	}{
		{"--scenarios", "", []string{"native", "netpila-clear"}, "TCP_RR"},
		{"--scenarios", "native,", []string{"native,netpila", "native,route"}, "native,native"},
		{"--metrics", "TCP_RR,UDP_", []string{"TCP_RR,UDP_PPS"}, "TCP_RR,TCP_RR"},
		{"--output", "", []string{"text", "json"}, "native"},
	} {
		_, out, _ := run(t, "", "__complete", "bench", "datapath", c.flag, c.typed)
		lines := "\n" + out
		for _, offer := range c.offers {
			if !strings.Contains(lines, "\n"+offer+"\n") {
				t.Errorf("%s %s<TAB> lacks %s: %q", c.flag, c.typed, offer, out)
			}
		}
		if strings.Contains(lines, "\n"+c.not+"\n") {
			t.Errorf("%s %s<TAB> offers %s", c.flag, c.typed, c.not)
		}
	}
}

// The names of the previous release run the same commands, and the help does not list them.
func TestBenchFormerNames(t *testing.T) {
	_, help, _ := run(t, "", "bench", "--help")
	for former, name := range map[string]string{"builds": "compare", "clean-up": "flow-delete"} {
		code, _, errs := run(t, "", "bench", former, "--nothing")
		wantCode, _, want := run(t, "", "bench", name, "--nothing")
		if code != wantCode || errs != strings.ReplaceAll(want, "bench "+name, "bench "+former) {
			t.Errorf("bench %s: exit %d, stderr %q; bench %s: exit %d, %q", former, code, errs, name, wantCode, want)
		}
		if strings.Contains(help, "\n  "+former) || !strings.Contains(help, "\n  "+name) {
			t.Errorf("help: %q, want %s and not %s", help, name, former)
		}
	}
}

func TestBenchFlowDeleteRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for line, says := range map[string]string{
		"--installed=": "use whole numbers", "--installed 1999": "choose 2000 to 200000", "--installed " +
			"2000,200001": "choose 2000 to 200000",
		"--quick --full": "none of the others can be", "-o xml": "use text, json or a folder",
		"x": "wrong number of arguments",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "flow-delete"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench flow-delete %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	t.Setenv("PATH", "/nonexistent")
	code, out, errs := run(t, "", "bench", "flow-delete")
	if code != ExitFailed ||
		!strings.Contains(errs, "install Open vSwitch (Debian: openvswitch-switch); nothing was measured") ||
		out != "" {
		t.Errorf("without Open vSwitch: exit %d, stdout %q, stderr %q", code, out, errs)
	}
}

// The command rejects what it does not know, names the package that a metric needs, and completes its own scenarios.
func TestBenchOncacheRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for line, says := range map[string]string{
		"--scenarios native,netpila": `there is no scenario "netpila"; use some of native, vxlan, oncache, `,
		"--metrics UDP_PPS":          `there is no metric "UDP_PPS"; use some of TCP_RR, `,
		"--peer flannel":             "use NAME=COMMAND",
		"--peer oncache=sh":          "there is a scenario oncache already",
		"--smoke --full":             "none of the others can be",
		"-o xml":                     "use text, json or a folder",
		"x":                          "wrong number of arguments",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "oncache"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench oncache %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	for typed, offer := range map[string]string{
		"--scenarios vxlan,": "vxlan,vxlan-tuned", "--metrics TCP_RR,": "TCP_RR,MEMCACHED",
	} {
		_, offers, _ := run(t, "", append([]string{"__complete", "bench", "oncache"}, strings.Fields(typed)...)...)
		if !strings.Contains("\n"+offers, "\n"+offer+"\n") {
			t.Errorf("bench oncache %s<TAB>: %q, want %s", typed, offers, offer)
		}
	}
	t.Setenv("PATH", "/nonexistent")
	code, out, errs := run(t, "", "bench", "oncache", "--smoke")
	if code != ExitFailed || !strings.Contains(errs, "(Debian: memcached)") ||
		!strings.Contains(errs, "nothing was measured") || out != "" {
		t.Errorf("without memcached: exit %d, stdout %q, stderr %q", code, out, errs)
	}
}

func TestBenchEntriesRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for line, says := range map[string]string{
		"--nodes 5": "choose two sizes or more", "--nodes 5,5": "choose two sizes or " +
			"more", "--nodes 0,5": "of 1 to 4000", "--nodes 1,4001": "of 1 to 4000", "--nodes=": "use whole numbers",
		"--switches hub": `no switch "hub"; use some of [ebpf ovs]`, "--quick --full": "none of the others can be",
		"-o xml": "use text, json or a folder", "x": "wrong number of arguments",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "entries"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench entries %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	if _, offers, _ := run(t, "", "__complete", "bench", "entries", "--switches", "ebpf,"); !strings.HasPrefix(
		offers,
		"ebpf,ovs\n",
	) {
		t.Errorf("--switches ebpf,<TAB>: %q, want ebpf,ovs", offers)
	}
	t.Setenv("PATH", "/nonexistent")
	code, out, errs := run(t, "", "bench", "entries")
	if code != ExitFailed || !strings.Contains(errs, "leave it out with --switches ebpf; nothing was counted") ||
		out != "" {
		t.Errorf("without Open vSwitch: exit %d, stdout %q, stderr %q", code, out, errs)
	}
}

// Every output states that it comes from a model. The command needs no root. The same seed gives the same report.
func TestBenchNIC(t *testing.T) {
	to := filepath.Join(t.TempDir(), "model")
	code, text, errs := run(t, "", "bench", "nic", "--figure", "8", "--seed", "5", "-o", to)
	if code != ExitDone || errs != "" || !strings.HasPrefix(text, nic.Nature+" Seed 5.\n") {
		t.Fatalf("bench nic: exit %d, stdout %q, stderr %q; want prefix %q", code, text, errs, nic.Nature)
	}
	page, err := os.ReadFile(filepath.Join(to, "report.html"))
	if err != nil || !strings.Contains(string(page), nic.Nature) {
		t.Errorf("report.html: %v, or it lacks %q", err, nic.Nature)
	}
	kept, err := os.ReadFile(filepath.Join(to, "report.json"))
	if err != nil {
		t.Fatal(err)
	}
	_, again, _ := run(t, "", "bench", "nic", "--figure", "8", "--seed", "5", "-o", "json")
	var r nic.Report
	if err := json.Unmarshal([]byte(again), &r); err != nil || again != string(kept) {
		t.Errorf("JSON with the same seed: %v, equal to report.json: %v, want true", err, again == string(kept))
	}
	if r.Nature != nic.Nature || r.Seed != 5 || len(r.Figures) != 1 || r.Figures[0].Number != 8 ||
		len(r.Parameters) == 0 {
		t.Errorf("report: %q, seed %d, %d figures; want %q, seed 5, figure 8",
			r.Nature, r.Seed, len(r.Figures), nic.Nature)
	}
	if _, help, _ := run(t, "", "bench", "nic", "--help"); !strings.Contains(help, "It is a model and no measurement") {
		t.Errorf("help: %q, want it to say that this is a model", help)
	}
	if _, offers, _ := run(t, "", "__complete", "bench", "nic", "--figure", ""); !strings.HasPrefix(
		offers,
		"7\n8\n12\nall\n",
	) {
		t.Errorf("--figure <TAB>: %q, want 7, 8, 12 and all", offers)
	}
}

// --matrix reads files that --record has written, and rejects other files. The command rejects incomplete combinations
// of flags.
func TestBenchNICMatrix(t *testing.T) {
	dir := t.TempDir()
	file, wrong, other := filepath.Join(dir, "m.tsv"), filepath.Join(dir, "wrong.tsv"), filepath.Join(dir, "other.tsv")
	if code, out, errs := run(t, "", "bench", "nic", "--record", file, "--seed", "5"); code != ExitDone ||
		!strings.Contains(out, "destinations in "+file+": the model") ||
		errs != "" {
		t.Fatalf("record: exit %d, stdout %q, stderr %q", code, out, errs)
	}
	for name, text := range map[string]string{wrong: "7 10.0.0.0/24 1\n", other: "# pilaster traffic matrix 1\n# a " +
		"lab\n7\t10.200.0.0/24\t9\n"} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for line, says := range map[string]string{"--matrix " + file: "the model of figure 8", "--matrix " + other +
		" --job " + other: "a lab"} {
		var r nic.Report
		code, out, errs := run(t, "", strings.Fields("bench nic -o json --seed 5 "+line)...)
		if err := json.Unmarshal([]byte(out), &r); code != ExitDone || err != nil || len(r.Figures) != 1 ||
			!strings.Contains(r.Figures[0].About, says) ||
			r.Nature != nic.Nature {
			t.Errorf("bench nic %s: exit %d, %v, %+v, stderr %q; want one figure about %q",
				line, code, err, r, errs, says)
		}
	}
	for line, says := range map[string]string{
		"--matrix " + wrong: "is no traffic matrix", "--matrix " + dir + "/none": "no such file", "--matrix " + file +
			" --job " + wrong: "--job " + wrong, "--job " + file: "--job needs --matrix",
		"--matrix " + file + " --figure 12": "applies only to figure 8", "--for 3s": "--ovs-run-dir needs " +
			"--record", "--record " + file + " --for 3s": "--for needs both", "--ovs-run-dir /x": "needs --record",
		"--record " + file + " --ovs-run-dir /x --for " +
			"0s": "use a duration above 0", "--record " + file + " --matrix " + file: "none of the others can " +
			"be", "--record " + dir + "/none/m.tsv": "no such file",
	} {
		code, out, errs := run(t, "", strings.Fields("bench nic "+line)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench nic %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line, says := range map[string]string{
		"--record " + dir + "/new.tsv --ovs-run-dir /nonexistent": "is it running with --ovs-run-dir " +
			"/nonexistent?", "--matrix " + other: "the job sends to none of them",
		"--record " + file + " --seed 6": file + " exists already and was not changed: name a new " +
			"file", "--record " + file + " --ovs-run-dir " +
			"/nonexistent": "exists already", "--record " + dir: "exists already",
	} {
		code, out, errs := run(t, "", strings.Fields("bench nic "+line)...)
		if code != ExitFailed || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench nic %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitFailed, says)
		}
	}
	if kept, err := os.ReadFile(file); err != nil || !bytes.Equal(kept, before) {
		t.Errorf("after rejected runs, the earlier file has %d bytes, want %d: %v", len(kept), len(before), err)
	}
	if _, err := os.Stat(dir + "/new.tsv"); !os.IsNotExist(err) {
		t.Errorf("file of a failed run: %v, want none", err)
	}
}

// The command reports before the measurement that it cannot write to a folder. giveUp removes a folder that the command
// has created.
func TestReportFolder(t *testing.T) {
	made, there := filepath.Join(t.TempDir(), "made"), t.TempDir()
	for _, dir := range []string{made, there} {
		giveUp, err := makeReportFolder(reportPlace(dir))
		if left, _ := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Fatalf("makeReportFolder(%s): %v, files %v; want an empty folder", dir, err, left)
		}
		giveUp()
		if _, err := os.Stat(dir); (err == nil) != (dir == there) {
			t.Errorf("%s after giveUp: %v, want it to exist: %v", dir, err, dir == there)
		}
	}
	if err := os.Mkdir(filepath.Join(there, "report.json"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := makeReportFolder(reportPlace(there)); exitCode(err) != ExitUsage ||
		!strings.Contains(err.Error(), "is a directory; nothing was measured") {
		t.Errorf("report.json is a folder: got %v, want a usage error", err)
	}
}
