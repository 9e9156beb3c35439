package lab

import (
	"strings"
	"testing"
)

// TestArgumentsOfOffloads: each agent has its rack and the lab's MTU reserve.
func TestArgumentsOfOffloads(t *testing.T) {
	l := newLab(folder(t.TempDir()))
	l.state.Spec = Spec{Nodes: NodeList{"n1", "n2"}, Racks: map[string]string{"n2": "a"}, MTUReserve: 104}
	for node, want := range map[string]bool{"n1": false, "n2": true} {
		argv := " " + strings.Join(l.agentProcess(node).Argv, " ") + " "
		if !strings.Contains(argv, " --mtu-reserve 104 ") || strings.Contains(argv, " --rack a ") != want {
			t.Errorf("arguments of %s: %s", node, argv)
		}
	}
	l.state.Spec = Spec{Nodes: NodeList{"n1"}}
	if argv := strings.Join(l.agentProcess("n1").Argv, " "); strings.Contains(argv, "--rack") ||
		strings.Contains(argv, "--mtu-reserve") {
		t.Errorf("arguments without racks: %s", argv)
	}
}
