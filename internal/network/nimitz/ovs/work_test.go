package ovs

import "testing"

func TestWork(t *testing.T) {
	const said = `main thread:
  packets received: 99
  packet recirculations: 48
  avg. datapath passes per packet: 1.48
  emc hits: 3
  megaflow hits: 140
  miss with success upcall: 4
pmd thread numa_id 0 core_id 1:
  packets received: 1
  smc hits: 1
`
	if w, err := parseWork(said); err != nil ||
		w != (Work{Packets: 100, Passes: 148, Exact: 3, Megaflow: 141, Upcalls: 4}) {
		t.Errorf("%+v, %v", w, err)
	}
	for _, wrong := range []string{"", "main thread:\n  packets received: many\n"} {
		if w, err := parseWork(wrong); err == nil {
			t.Errorf("%q parses to %+v", wrong, w)
		}
	}
}
