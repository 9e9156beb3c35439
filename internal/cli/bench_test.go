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
		t.Errorf("metrics that no scenario has: exit %d", code)
	}
	for line, says := range map[string]string{
		"--scenarios native,nonsense":         `there is no scenario "nonsense"; say some of native, route, vxlan, `,
		"--metrics TCP_RR,tcp_crr":            `there is no metric "tcp_crr"; say some of TCP_RR, UDP_RR, `,
		"--scenarios native,":                 `there is no scenario ""; say some of native, `,
		"--metrics ,TCP_RR":                   `there is no metric ""; say some of TCP_RR, `,
		"-o xml":                              "say text, json or a folder; ./xml is a folder of that name",
		"-o JSON":                             "say text, json or a folder",
		"--output=":                           "say text, json or a folder; ./results",
		"--scenarios=":                        "--scenarios is empty",
		"--metrics=":                          "--metrics is empty",
		"--quick --full":                      "none of the others can be",
		"--smoke --full --scenarios nonsense": "none of the others can be",
		"nonsense":                            "the arguments do not fit",
		"--peer flannel":                      "say NAME=COMMAND",
		"--peer flannel=":                     "say NAME=COMMAND",
		"--output /dev/null/x":                "not a directory; nothing was measured",
		"--peer ../x=sh":                      "say NAME=COMMAND",
		"--peer x=/nonexistent/x":             "no such file",
		"--peer native=sh":                    "there is a scenario native already",
		"--peer x=sh --peer x=sh":             "there is a scenario x already",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "datapath"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench datapath %s: exit %d, stdout %q, stderr %q", line, code, out, errs)
		}
	}
}

func TestBenchCompareRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for line, says := range map[string]string{
		"":                              "the arguments do not fit",
		"/bin/sh x":                     "the arguments do not fit",
		"/nonexistent/pilaster":         "no such file or directory; name a build of this program as a path",
		"nonexistent":                   "name a build of this program as a path",
		"/bin/sh --scenarios netpila,x": `there is no scenario "x"`,
		"/bin/sh --scenarios=":          "--scenarios is empty",
		"/bin/sh --metrics tcp_rr":      `there is no metric "tcp_rr"`,
		"/bin/sh --pairs 5":             "say 6 or more",
		"/bin/sh --at-least 0":          "say more than 0 and 1 at most",
		"/bin/sh --at-least NaN":        "say more than 0 and 1 at most",
		"/bin/sh --at-least 1.1":        "say more than 0 and 1 at most",
		"/bin/sh -o xml":                "say text, json or a folder",
		"/bin/sh --output /dev/null/x":  "nothing was measured",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "compare"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench compare %s: exit %d, stdout %q, stderr %q", line, code, out, errs)
		}
	}
	if _, offers, _ := run(t, "", "__complete", "bench", "compare", "/bin/sh", "--metrics",
		"UDP_RR,"); !strings.Contains(
		offers,
		"UDP_RR,UDP_PPS\n",
	) {
		t.Errorf("--metrics UDP_RR,<TAB>: %q", offers)
	}
}

// A folder is one, whatever its name.
func TestReportPlace(t *testing.T) {
	for to, folder := range map[string]bool{"text": false, "json": false, "results": true, "./xml": true,
		"dist/bench": true} {
		var p reportPlace
		if err := p.Set(to); err != nil || p.isFolder() != folder || p.String() != to {
			t.Errorf("%s: %v, a folder: %v", to, err, p.isFolder())
		}
	}
	if _, help, _ := run(t, "", "bench", "--help"); !strings.Contains(help, "ONCache") ||
		!strings.Contains(help, "bounds") {
		t.Errorf("what is compared: %s", help)
	}
}

// What this kernel cannot do is no scenario here: named, it is refused and nothing is measured; it is not offered.
func TestBenchLeavesOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	lacks := device.HasNetkit()
	_, offers, _ := run(t, "", "__complete", "bench", "datapath", "--scenarios", "")
	for _, name := range []string{"bound-netkit", "netpila-netkit"} {
		if strings.Contains("\n"+offers, "\n"+name+"\n") != (lacks == nil) {
			t.Errorf("%v, and offered: %q", lacks, offers)
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
	for line, says := range map[string]string{"--rounds 0": "say 6 or more", "--rounds 5": "an interval needs as " +
		"many", "-o yaml": "text or json", "x": "do not fit"} {
		code, _, errs := run(t, "", append([]string{"bench", "check"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) {
			t.Errorf("bench check %s: exit %d, stderr %q", line, code, errs)
		}
	}
}

// Names are offered one after the other, each once.
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
			t.Errorf("help: %q", help)
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
		"--quick --full": "none of the others can be", "-o xml": "say text, json or a folder", "x": "do not fit",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "flow-delete"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench flow-delete %s: exit %d, stdout %q, stderr %q", line, code, out, errs)
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

func TestBenchEntriesRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for line, says := range map[string]string{
		"--nodes 5": "choose two sizes or more", "--nodes 5,5": "choose two sizes or " +
			"more", "--nodes 0,5": "of 1 to 4000", "--nodes 1,4001": "of 1 to 4000", "--nodes=": "use whole numbers",
		"--switches hub": `no switch "hub"; say some of [ebpf ovs]`, "--quick --full": "none of the others can be", "-o xml": "say text, json or a folder", "x": "do not fit",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "entries"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench entries %s: exit %d, stdout %q, stderr %q", line, code, out, errs)
		}
	}
	if _, offers, _ := run(t, "", "__complete", "bench", "entries", "--switches", "ebpf,"); !strings.HasPrefix(
		offers,
		"ebpf,ovs\n",
	) {
		t.Errorf("--switches ebpf,<TAB>: %q", offers)
	}
	t.Setenv("PATH", "/nonexistent")
	code, out, errs := run(t, "", "bench", "entries")
	if code != ExitFailed || !strings.Contains(errs, "leave it out with --switches ebpf; nothing was counted") ||
		out != "" {
		t.Errorf("without Open vSwitch: exit %d, stdout %q, stderr %q", code, out, errs)
	}
}

// The model says in every form that it is one, needs no root, and is the same again.
func TestBenchNIC(t *testing.T) {
	to := filepath.Join(t.TempDir(), "model")
	code, text, errs := run(t, "", "bench", "nic", "--figure", "8", "--seed", "5", "-o", to)
	if code != ExitDone || errs != "" || !strings.HasPrefix(text, nic.Nature+" Seed 5.\n") {
		t.Fatalf("exit %d, stdout %q, stderr %q", code, text, errs)
	}
	page, err := os.ReadFile(filepath.Join(to, "report.html"))
	if err != nil || !strings.Contains(string(page), nic.Nature) {
		t.Errorf("the page: %v", err)
	}
	kept, err := os.ReadFile(filepath.Join(to, "report.json"))
	if err != nil {
		t.Fatal(err)
	}
	_, again, _ := run(t, "", "bench", "nic", "--figure", "8", "--seed", "5", "-o", "json")
	var r nic.Report
	if err := json.Unmarshal([]byte(again), &r); err != nil || again != string(kept) {
		t.Errorf("the same seed as JSON: %v, same as before: %v", err, again == string(kept))
	}
	if r.Nature != nic.Nature || r.Seed != 5 || len(r.Figures) != 1 || r.Figures[0].Number != 8 ||
		len(r.Parameters) == 0 {
		t.Errorf("%q, seed %d, %d figures", r.Nature, r.Seed, len(r.Figures))
	}
	if _, help, _ := run(t, "", "bench", "nic", "--help"); !strings.Contains(help, "It is a model and no measurement") {
		t.Errorf("help: %q", help)
	}
	if _, offers, _ := run(t, "", "__complete", "bench", "nic", "--figure", ""); !strings.HasPrefix(
		offers,
		"7\n8\n12\nall\n",
	) {
		t.Errorf("--figure <TAB>: %q", offers)
	}
}

// A matrix that was recorded is what preheating reads; what is none, or says too little, is refused.
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
			t.Errorf("%s: exit %d, %v, %+v, stderr %q", line, code, err, r, errs)
		}
	}
	for line, says := range map[string]string{
		"--matrix " + wrong: "is no traffic matrix", "--matrix " + dir + "/none": "no such file", "--matrix " + file +
			" --job " + wrong: "--job " + wrong, "--job " + file: "say both",
		"--matrix " + file + " --figure 12": "is of figure 8", "--for 3s": "says what --record " +
			"counts", "--record " + file + " --for 3s": "says what --record counts", "--ovs-run-dir /x": "says what " +
			"--record counts",
		"--record " + file + " --ovs-run-dir /x --for " +
			"0s": "say how long", "--record " + file + " --matrix " + file: "none of the others can " +
			"be", "--record " + dir + "/none/m.tsv": "no such file",
	} {
		code, out, errs := run(t, "", strings.Fields("bench nic "+line)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("%s: exit %d, stdout %q, stderr %q", line, code, out, errs)
		}
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line, says := range map[string]string{
		"--record " + dir + "/new.tsv --ovs-run-dir /nonexistent": "is it running with --ovs-run-dir " +
			"/nonexistent?", "--matrix " + other: "the job sends to none of them",
		"--record " + file + " --seed 6": file + " exists already; it was left as it was: name a new " +
			"file", "--record " + file + " --ovs-run-dir " +
			"/nonexistent": "exists already", "--record " + dir: "exists already",
	} {
		code, out, errs := run(t, "", strings.Fields("bench nic "+line)...)
		if code != ExitFailed || !strings.Contains(errs, says) || out != "" {
			t.Errorf("%s: exit %d, stdout %q, stderr %q", line, code, out, errs)
		}
	}
	if kept, err := os.ReadFile(file); err != nil || !bytes.Equal(kept, before) {
		t.Errorf("a record that was refused has left %d of %d bytes of the one before, %v", len(kept), len(before), err)
	}
	if _, err := os.Stat(dir + "/new.tsv"); !os.IsNotExist(err) {
		t.Errorf("a record that failed has left a file: %v", err)
	}
}

// What cannot be written is known before anything is measured, and a folder that was made for nothing goes.
func TestReportFolder(t *testing.T) {
	made, there := filepath.Join(t.TempDir(), "made"), t.TempDir()
	for _, dir := range []string{made, there} {
		giveUp, err := makeReportFolder(reportPlace(dir))
		if left, _ := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Fatalf("%s: %v, %v", dir, err, left)
		}
		giveUp()
		if _, err := os.Stat(dir); (err == nil) != (dir == there) {
			t.Errorf("given up, %s: %v", dir, err)
		}
	}
	if err := os.Mkdir(filepath.Join(there, "report.json"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := makeReportFolder(reportPlace(there)); exitCode(err) != ExitUsage ||
		!strings.Contains(err.Error(), "is a directory; nothing was measured") {
		t.Errorf("report.json cannot be written: %v", err)
	}
}
