package sim

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestExamples: the example scenarios for users are valid.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../docs/scenarios/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("found %v, %v", files, err)
	}
	for _, file := range files {
		if _, err := Read(file); err != nil {
			t.Error(err)
		}
	}
}

func TestParse(t *testing.T) {
	s, err := Parse("some/peak.yaml", []byte(`
nodes: 100
containersPerNode: 31
seed: 7
limits: {time: 5m, memory: 16GiB, messages: 100000}
events:
- {do: grow, by: 10%, within: 30s}
- do: crash
  by: 3
- {do: restart-orchestrator}
`))
	if err != nil {
		t.Fatal(err)
	}
	if s.Name != "peak" || s.Network != "netpila" || s.Addressing != "encrypted" || s.Tenants != 1 || s.AtOnce != 512 ||
		s.Seed != 7 {
		t.Errorf("read %+v", s)
	}
	if s.Limits != (Limits{5 * time.Minute, 16 << 30, 100_000}) || s.Limits.Memory.String() != "16GiB" {
		t.Errorf("limits are %+v", s.Limits)
	}
	want := []Event{
		{Do: Grow, By: Amount{10, true}, Within: 30 * time.Second},
		{Do: Crash, By: Amount{3, false}},
		{Do: RestartOrchestrator},
	}
	if !slices.Equal(s.Events, want) {
		t.Errorf("events are %+v, want %+v", s.Events, want)
	}
}

// TestOneDocument: document markers around the only document are valid.
func TestOneDocument(t *testing.T) {
	for _, text := range []string{"---\nnodes: 5\n", "# of nodes\n---\n# five\nnodes: " +
		"5\n...\n", "nodes: 5\n---\n", "nodes: 0x5"} {
		if s, err := Parse("f.yaml", []byte(text)); err != nil || s.Nodes != 5 {
			t.Errorf("%q parses to %+v, %v", text, s, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"nodes: 0":             "f.yaml:1: nodes 0: use 1 to 1000000",
		"nodes: 1\nnoodles: 2": `f.yaml:2: unknown key "noodles": the keys here are name, seed`,
		"nodes: many":          "f.yaml:1: nodes many: use a whole number",
		"nodes: 5\ncontainersPerNode: 5000": "f.yaml:2: containersPerNode 5000: use 0 " +
			"to 4096",
		"nodes: 5\nnetwork: gre":    `f.yaml:2: network "gre": use netpila, nimitz, ila or evpn`,
		"nodes: 5\naddressing: own": `f.yaml:2: addressing "own": use encrypted or clear`,
		"nodes: 5\ncidr: 10.0.0.0/8": "f.yaml: cidr, nodeBits, noNodeCIDRs and " +
			"mappingsBy are for network nimitz",
		"nodes: 5\nnetwork: nimitz\ncidr: 10.0": "f.yaml:3: cidr 10.0: use a range of " +
			"addresses, such as 10.0.0.0/16",
		"nodes: 5\nnetwork: nimitz\nnodeBits: 4": "f.yaml: ",
		"nodes: 5\nevents:\n- {do: nothing}": `f.yaml:3: event "nothing": use change-endpoint, change-policy, ` +
			`crash, grow, reconnect, restart-job, restart-orchestrator, shrink`,
		"nodes: 5\nevents:\n- {do: change-policy}": "f.yaml:3: event change-policy needs " +
			"nodes with containers",
		"nodes: 5\nevents:\n- {do: change-policy, times: -1}": "f.yaml:3: times -1: use 1 to 10000",
		"nodes: 5\nevents:\n- {do: change-policy, times: 0}": "f.yaml:3: times: use more than 0, or " +
			"omit it",
		"nodes: 5\nevents:\n- {do: crash, by: 1, times: 2}": "f.yaml:3: times is for event change-policy " +
			"or change-endpoint",
		"nodes: 5\ncontainersPerNode: 1\nevents:\n- {do: change-endpoint}": "f.yaml:4: event change-endpoint needs " +
			"services: set services",
		"nodes: 5\nservices: 1\nevents:\n- {do: change-endpoint}": "f.yaml:4: event change-endpoint needs nodes " +
			"with containers",
		"nodes: 5\nevents:\n- {do: reconnect, perSecond: 2}": "f.yaml:3: perSecond is for event change-endpoint",
		"nodes: 5\ncontainersPerNode: 1\nservices: 1\nevents:\n- {do: change-endpoint, perSecond: 2000}": "f.yaml:5" +
			": perSecond 2000: use 1 to 1000",
		"nodes: 5\ncontainersPerNode: 1\nservices: 1\nevents:\n- {do: change-endpoint, perSecond: 0}": "f.yaml:5" +
			": perSecond: use more than 0, or omit it",
		"nodes: 5\nservices: 0":                  "f.yaml:2: services: use more than 0, or omit it",
		"nodes: 5\ntenants: 100\nservices: 101":  "f.yaml:3: services 101: use 0 to 100",
		"nodes: 5\nnetwork: nimitz\nservices: 1": "f.yaml:3: services is for network netpila",
		"nodes: 5\ncontainersPerNode: 3\nservices: 5000": "f.yaml:3: services 5000: 125000 endpoints for up to 5 " +
			"nodes: the maximum of a cluster is 100000",
		"nodes: 5\nevents:\n- {do: grow}": "f.yaml:3: event grow needs a number of " +
			"nodes",
		"nodes: 5\nevents:\n- {do: reconnect, by: 1}": "f.yaml:3: event reconnect affects all " +
			"nodes; leave by out",
		"nodes: 5\nevents:\n- {do: grow, by: 10%}": "f.yaml:3: event grow 10%: 10% of 5 nodes " +
			"is less than one node",
		"nodes: 5\nevents:\n- {do: grow, by: 0}": `f.yaml:3: by 0: write a number of nodes`,
		"nodes: 5\nevents:\n- {do: shrink, by: 5}": "f.yaml:3: event shrink 5: 5 of 5 nodes: " +
			"at least one must remain",
		"nodes: 5\nevents:\n- {do: shrink, by: 2}\n- {do: crash, by: 4}": "f.yaml:4: event crash 4: 4 of 3 nodes: " +
			"there are too few",
		"nodes: 5\nevents:\n- {do: grow, by: 1, listFirst: true}": "f.yaml:3: listFirst is for event grow on " +
			"network nimitz",
		"nodes: 5\nevents:\n- {do: grow, by: 1, within: soon}": "f.yaml:3: within soon: use a time with " +
			"its unit, such as 30s",
		"nodes: 5\nlimits: {memory: much}": `f.yaml:2: memory much: write a size`,
		"nodes: 900000\nevents:\n- {do: grow, by: 50%}": "f.yaml:3: event grow 50%: 900000 nodes " +
			"and 450000 more: the maximum is 1000000",
		"nodes: 5\nnetwork: nimitz\naddressing: clear": "f.yaml:3: addressing is for network " +
			"netpila",
		"nodes: 5\nactivePeers: 3":                      `f.yaml:2: activePeers is for network ila`,
		"nodes: 5\nnetwork: ila\nactivePeers: 0":        `f.yaml:3: activePeers: use more than 0`,
		"nodes: 5\nnetwork: nimitz\nmappingsBy: rumour": `f.yaml:3: mappingsBy "rumour": use stream`,
		"nodes: 5\nnetwork: nimitz\nmappingsBy: query\nnoNodeCIDRs: true": `f.yaml:3: mappingsBy "query": ` +
			`use stream, or, if nodes have subnets, query`,
		"nodes: 5\nnetwork: nimitz\nnodeBits: 24\nnoNodeCIDRs: true": "f.yaml:3: nodeBits needs nodes with " +
			"subnets",
		"nodes: 5\nnetwork: nimitz\nevents: [{do: crash, by: 1, bye: 1}]": `f.yaml:3: unknown key "bye": ` +
			`the keys here are do, by, within, times, perSecond, listFirst`,
		"nodes: &n 20.5":           "f.yaml:1: nodes 20.5: use a whole number",
		"nodes: .inf":              "f.yaml:1: nodes .inf: use a whole number",
		"nodes: 5\nnoNodeCIDRs: 1": "f.yaml:2: noNodeCIDRs 1: use true or false",
		"nodes: 5\nlimits: {time: 300}": "f.yaml:2: time 300: use a time with its " +
			"unit, such as 300s",
		"nodes: 5\nlimits: {time: 0}": "f.yaml:2: time 0: use a time with its " +
			"unit, such as 30s",
		"nodes: 20.5": "f.yaml:1: nodes 20.5: use a whole number",
		"nodes: 5\nseed: -3": "f.yaml:2: seed -3: use a whole number, 0 " +
			"or more",
		"nodes: 5\ntenants: 0": "f.yaml:2: tenants: use more than 0, or " +
			"omit it",
		"nodes: 5\natOnce: 0": "f.yaml:2: atOnce: use more than 0, or " +
			"omit it",
		"nodes: 5\nlistRate: 200": "f.yaml:2: listRate is for network nimitz",
		"nodes: 5\nnetwork: nimitz\ncidr: fd10::/999": "f.yaml:3: cidr fd10::/999: use a range " +
			"of addresses",
		"nodes: 5\nlimits:\n  time: 0s": "f.yaml:3: time: use more than 0, or " +
			"omit it",
		"nodes: 5\nlimits: {time: -1s}":    "f.yaml:2: time -1s: use more than 0",
		"nodes: 5\nlimits: {messages: 0}":  "f.yaml:2: messages: use more than 0",
		"nodes: 5\nlimits: {messages: -1}": "f.yaml:2: messages -1: use more than 0",
		"nodes: 5\nlimits: {memory: 0}":    "f.yaml:2: memory 0: write a size",
		"nodes: 5\nevents:\n- {do: reconnect, within: 0s}": "f.yaml:3: within: use more than 0, or " +
			"omit it",
		"nodes: 5\nevents:\n- {do: reconnect, within: -5s}": "f.yaml:3: within -5s: use more than 0, " +
			"or omit it",
		"nodes: 5\nevents:\n- {do: reconnect, within: 30}": "f.yaml:3: within 30: use a time with its " +
			"unit, such as 30s",
		"nodes: 5\n---\nnodes: 6": "f.yaml:3: a second document begins here",
	} {
		_, err := Parse("f.yaml", []byte(text))
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got error\n%v\nwant\n%v", text, err, want)
		}
	}
}

// TestPlan: the seed alone decides which nodes events affect, and which agents restart.
func TestPlan(t *testing.T) {
	s := Scenario{
		Seed:  3,
		Nodes: 10,
		Events: []Event{
			{Do: Shrink, By: Amount{N: 4}},
			{Do: Grow, By: Amount{50, true}},
			{Do: Crash, By: Amount{N: 5}},
			{Do: Reconnect},
		},
	}
	one, again := s.plan(), s.plan()
	for i := range one {
		if !slices.Equal(one[i].nodes, again[i].nodes) {
			t.Errorf("%v affects nodes %v, and in the second plan %v", one[i].Event, one[i].nodes, again[i].nodes)
		}
	}
	s.Seed = 4
	if other := s.plan(); slices.Equal(one[0].nodes, other[0].nodes) && slices.Equal(one[2].nodes, other[2].nodes) {
		t.Errorf("another seed gives the same plan: %v", one)
	}
	if !slices.Equal(one[1].nodes, []int{11, 12, 13}) {
		t.Errorf("got new nodes %v", one[1].nodes)
	}
	kept := keeps(one)
	for _, n := range one[2].nodes {
		if slices.Contains(one[0].nodes, n) || !kept[n] {
			t.Errorf("node %d crashes; nodes %v were removed, and %v keep their disks", n, one[0].nodes, kept)
		}
	}
	if len(kept) != 5 {
		t.Errorf("got nodes %v that keep their disks", kept)
	}
}
