package ops_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/steering"
)

// TestAgentSteering: agents with --steering steer their uplink and the VXLAN device of network nimitz, and `steering
// reset` restores both.
func TestAgentSteering(t *testing.T) {
	ctx := labtest.Context(t)
	name := labtest.Name(t)
	labtest.New(t, lab.Spec{
		Name: name, Nodes: []string{"n1"}, Device: endpoint.Veth, LabKeys: labtest.Switch("ebpf", nil),
	}, func(o *lab.Options) { o.AgentArgs = []string{"--steering", "rps"} })
	on := func(arguments ...string) string {
		t.Helper()
		line := append([]string{"lab", "exec", "--lab", name, "n1", "--", "pilaster", "steering"}, arguments...)
		out, err := exec.CommandContext(ctx, labtest.Binary(t), line...).Output()
		if err != nil {
			t.Fatalf("steering %v: %v", arguments, err)
		}
		return string(out)
	}
	want := []string{"host eth0 rps", "overlay pilvxlan rps"}
	for {
		var s steering.Status
		must(t, json.Unmarshal([]byte(on("status", "-o", "json")), &s))
		var got []string
		for _, d := range s.Devices {
			if d.Problem != "" || d.CPUs == "none" || d.Before["rx-0/rps_cpus"] != "0" {
				t.Errorf("got %+v", d)
			}
			got = append(got, strings.Join([]string{d.Level, d.Name, d.Mode}, " "))
		}
		if slices.Sort(got); slices.Equal(got, want) {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("got %q, want %q", got, want)
		}
		time.Sleep(20 * time.Millisecond) // until the agent has noticed the device
	}
	restored := on("reset")
	if !strings.Contains(restored, "restored eth0\n") || !strings.Contains(restored, "restored pilvxlan\n") {
		t.Errorf("reset printed %q", restored)
	}
	if out := on("status"); !strings.Contains(out, "no steering is set") {
		t.Errorf("after the reset: %s", out)
	}
}

// TestNodeResetRestoresSteering: `node reset` restores what `steering apply` or an agent has set, and removes the
// record.
func TestNodeResetRestoresSteering(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	ns, err := netns.Create(filepath.Join(dir, "ns"))
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(ns.Close(), netns.Remove(ns.Path()))) })
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "wire"}))
	run := filepath.Join(dir, "run")
	in := func(arguments ...string) string {
		t.Helper()
		var out, complaint strings.Builder
		c := exec.CommandContext(labtest.Context(t), labtest.Binary(t), append(arguments, "--run-dir", run)...)
		c.Stdout, c.Stderr = &out, &complaint
		if err := ns.Run(c); err != nil {
			t.Fatalf("%v: %v: %s", arguments, err, &complaint)
		}
		return out.String()
	}
	in("steering", "apply", "--mode", "rps", "--uplink", "eth0", "--levels", "host")
	before, err := steering.In(run).Status()
	must(t, err)
	out := in("node", "reset", "--yes", "--state-dir", filepath.Join(dir, "state"), "--bpffs",
		filepath.Join(dir, "bpf"))
	if _, err := os.Stat(run); len(before.Devices) != 1 || !strings.Contains(out, "eth0") || !os.IsNotExist(err) {
		t.Errorf("before %+v, run folder %v, reset printed %s", before, err, out)
	}
	// Applied again, the record shows what is set now.
	in("steering", "apply", "--mode", "rps", "--uplink", "eth0", "--levels", "host")
	now, err := steering.In(run).Status()
	must(t, err)
	if len(now.Devices) != 1 || now.Devices[0].Before["rx-0/rps_cpus"] != "0" {
		t.Errorf("after the reset: %+v", now)
	}
}
