package ops_test

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
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
