package cli

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/lab"
)

func TestLabMistakes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	root := t.TempDir()
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("nodes: [n1]\ncolour: red\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bond := filepath.Join(t.TempDir(), "bond.yaml")
	if err := os.WriteFile(bond, []byte("nodes: [n1]\ndevice: bond\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	netkit := filepath.Join(t.TempDir(), "netkit.yaml")
	if err := os.WriteFile(netkit, []byte("nodes: [n1]\ndevice: netkit\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if lacks := device.HasNetkit(); lacks != nil {
		code, _, errs := run(t, "", "lab", "up", "-f", netkit, "--lab-root", root)
		if want := "error: lab netkit: " + lacks.Error() + "\n  nothing was changed; choose another --device: veth, " +
			"macvlan, auto\n"; code != ExitFailed ||
			errs != want {
			t.Errorf("netkit on a kernel without it: exit %d, stderr %q; want %q", code, errs, want)
		}
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"lab up", ExitUsage, `required flag(s) "file" not set`},
		{"lab up -f " + bad, ExitUsage, `bad.yaml:2: unknown key "colour"`},
		{"lab up -f " + bond, ExitUsage, bond + `:2: device "bond": use veth, macvlan, netkit, auto`},
		{"lab up -f /no/such/file", ExitUsage, "no such file"},
		{"lab ping b1", ExitUsage, "usage: pilaster lab ping [FROM TO]"},
		{"lab ping -c 0", ExitUsage, "must be more than 0"},
		{"lab ping -W -1s", ExitUsage, "must be more than 0"},
		{"lab up " + bad, ExitUsage, "usage: pilaster lab up -f FILE"},
		{"lab exec b1", ExitUsage, "usage: pilaster lab exec NAME -- COMMAND…"},
		{"lab status", ExitFailed, "no lab is up; start one with: pilaster lab up -f FILE"},
		{"lab down gone", ExitFailed, "no lab is up"},
		{"lab status gone", ExitFailed, "no lab is up"},
		{"lab status demo other", ExitUsage, "usage: pilaster lab status [NAME]"},
		{"lab status demo --lab other", ExitUsage, "the argument names lab demo, and --lab names lab other"},
		{"lab down demo --lab other", ExitUsage, "the argument names lab demo, and --lab names lab other"},
		{"lab nonsense", ExitUsage, "unknown command"},
	} {
		t.Run(c.args, func(t *testing.T) {
			var out, complaint bytes.Buffer
			args := append(strings.Fields(c.args), "--lab-root", root)
			code := Run(t.Context(), Env{Args: args, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &complaint})
			if code != c.code || !strings.Contains(complaint.String(), c.says) {
				t.Errorf("exit %d, %q; want %d, %q", code, complaint.String(), c.code, c.says)
			}
		})
	}
}

// TestLabNames: down and status take the name of a lab as an argument or as the flag --lab.
func TestLabNames(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	root := t.TempDir()
	for _, name := range []string{"demo", "other"} { // as a crash leaves them behind
		if err := os.Mkdir(filepath.Join(root, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range []string{
		"lab status demo", "lab status --lab demo", "lab status demo --lab demo",
		"lab down demo", "lab down --lab other",
	} {
		code, out, errs := run(t, "", append(strings.Fields(args), "--lab-root", root)...)
		if strings.Contains(args, "status") {
			if want := "error: lab demo: "; code != ExitFailed || !strings.HasPrefix(errs, want) {
				t.Errorf("%s: exit %d, stderr %q; want %d, %q", args, code, errs, ExitFailed, want)
			}
			continue
		}
		name := args[strings.LastIndex(args, " ")+1:]
		if want := "lab " + name + " is down\n"; code != ExitDone || out != want {
			t.Errorf("%s: exit %d, stdout %q, stderr %q; want %d, %q", args, code, out, errs, ExitDone, want)
		}
	}
}

func TestLabHelpHasExamples(t *testing.T) {
	for _, sub := range []string{"", "up", "down", "status", "exec", "ping"} {
		var out bytes.Buffer
		code := Run(
			t.Context(),
			Env{
				Args:   append(strings.Fields("lab "+sub), "--help"),
				Stdin:  strings.NewReader(""),
				Stdout: &out,
				Stderr: &out,
			},
		)
		if code != ExitDone || !strings.Contains(out.String(), "Examples:\n  pilaster lab ") {
			t.Errorf("lab %s --help: exit %d\n%s", sub, code, out.String())
		}
	}
}

// While a tenant migrates, lab status shows the addresses of both networks. It names the agents that do not respond.
func TestLabStatusDuringMigration(t *testing.T) {
	four, hidden, plain := netip.MustParseAddr(
		"10.0.0.2",
	), netip.MustParseAddr(
		"fc00::7",
	), netip.MustParseAddr(
		"fd70::7",
	)
	c := lab.ContainerOutput{
		Name:      "b1",
		Addresses: []netip.Addr{four, hidden},
		Attachments: []lab.Attachment{
			{Network: "nimitz", Address: four},
			{Network: "netpila", Address: hidden, Plaintext: plain},
		},
	}
	var out bytes.Buffer
	printLab(
		&out,
		lab.Status{
			Nodes:      []lab.NodeStatus{{Name: "n1"}, {Name: "n2", Silent: true}},
			Containers: []lab.ContainerOutput{c},
		},
	)
	text := out.String()
	if !strings.Contains(text, "\t10.0.0.2, fc00::7\tencapsulated, fd70::7\t") ||
		strings.Contains(text, "n1 does not answer") ||
		!strings.Contains(
			text,
			"the agent of n2 does not answer: the addresses of its containers are the last known ones\n",
		) {
		t.Errorf("status lacks addresses of a network, or names the wrong agents:\n%s", text)
	}
}

// TestLabStatusWithoutSupervisor: if the supervisor was killed, lab status shows the state of processes as unknown,
// because they may still run.
func TestLabStatusWithoutSupervisor(t *testing.T) {
	s := lab.Status{Name: "demo", Nodes: []lab.NodeStatus{{Name: "n1"}}}
	var out bytes.Buffer
	printLab(&out, s)
	if text := out.String(); strings.Contains(text, "not running") || !strings.Contains(text, "unknown") ||
		!strings.Contains(text, "lab down demo") {
		t.Errorf("without a supervisor:\n%swant unknown processes and the command to remove the lab", text)
	}
	s.Supervisor = 7
	out.Reset()
	printLab(&out, s)
	if text := out.String(); !strings.Contains(text, "not running") || !strings.Contains(text, "supervisor 7\n") {
		t.Errorf("with a supervisor:\n%swant its pid, and processes that do not run", text)
	}
}
