package cpuprofile

import (
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// TestSampler: the sampler takes one sample for each Period of CPU time, even if other threads use the CPU too.
func TestSampler(t *testing.T) {
	cpu, err := traffic.LastCPU()
	if err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // never unlocked: the pinned thread ends with the test
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	s, err := NewSampler(cpu)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	spent := func() time.Duration {
		is, err := progrun.ThreadTime()
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	from := spent()
	for spent() < from+200*time.Millisecond {
	}
	all, err := s.Stop()
	if err != nil {
		t.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(i Sample) bool { return int(i.PID) != os.Getpid() })
	if sampled := time.Duration(len(all)) * Period; sampled < 50*time.Millisecond ||
		sampled > 300*time.Millisecond {
		t.Errorf("got %v of samples for 200 ms of a thread", sampled)
	}
}

func TestPlaces(t *testing.T) {
	for function, want := range map[string]string{
		"bpf: journey_on": "our programs", "trie_lookup_elem": "the programs' tables, helpers and " +
			"hooks", "bpf_skb_set_tunnel_key": "the programs' tables, helpers and hooks",
		"vxlan_xmit_one": "VXLAN and tunnels of the kernel", "udp_tunnel6_xmit_skb": "VXLAN and tunnels of the " +
			"kernel", "packet_rcv": "packet sockets, taps and polling",
		"ip6_pol_route": "IPv6, routes and " +
			"neighbours", "udpv6_sendmsg": "UDP and sockets", "veth_xmit": "devices and their " +
			"queues", "kmem_cache_free": "packets' memory",
		"finish_task_switch.isra.0": "scheduler, wake-ups and locks", "do_syscall_64": Elsewhere,
	} {
		if got := PlaceOf(function); got != want {
			t.Errorf("%s: got place %q, want %q", function, got, want)
		}
	}
	names := Symbols{{100, "a"}, {200, "b"}}
	for at, want := range map[uint64]string{99: "unknown", 100: "a", 199: "a", 200: "b", 1 << 40: "b"} {
		if got := names.Name(at); got != want {
			t.Errorf("address %d: got function %s, want %s", at, got, want)
		}
	}
	w := Workers{7: ByGenerator}
	for i, want := range map[Sample]string{{Address: 5, PID: 7}: ByGenerator, {Address: KernelFrom + 5,
		PID: 8}: ByOthers, {Address: KernelFrom + 5, PID: 7}: Elsewhere} {
		if got, _ := w.PlaceOf(i, names); got != want {
			t.Errorf("%+v: got place %q, want %q", i, got, want)
		}
	}
}
