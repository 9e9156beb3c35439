package bench

import (
	"net/netip"

	"pilaster.io/pilaster/internal/netns"
)

// Scenario is one way from a client to a server. The first of a run is what the others are compared to.
type Scenario struct {
	Name  string
	About string
	// AtLeast is the ratio to the first scenario that a run must reach; 0 asks for none.
	AtLeast float64
	// Build joins a pair over two fresh nodes; what it opens is closed with the wire.
	Build func(*wire) (Pair, error)
}

// Pair is where client and server run, and what the client connects to.
type Pair struct {
	Client, Server *netns.Namespace
	Target         netip.Addr
}

// Datapath is what `pilaster bench datapath` compares. A new network adds its value here.
func Datapath() []Scenario {
	return []Scenario{
		{Name: "native", About: "node to node, no container", Build: native},
		{Name: "route", About: "containers behind veth pairs, routed by the kernels of both nodes", Build: route},
		Netpila(),
	}
}

// Netpila is our datapath, driven as an agent drives it.
func Netpila() Scenario {
	return Scenario{Name: "netpila", About: "containers of an encrypted tenant on our datapath", AtLeast: 0.85, Build: netpila}
}

func native(w *wire) (Pair, error) {
	return Pair{w.nodes[0].ns, w.nodes[1].ns, w.nodes[1].underlay}, nil
}

func route(w *wire) (Pair, error) {
	return w.containers((*node).addRouted)
}

func netpila(w *wire) (Pair, error) {
	return w.containers((*node).addNetpila)
}
