package nic

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Matrix is a node's row of a recorded traffic matrix (§3.3): the packets that the node has sent to other nodes, by
// megaflow, the busiest megaflow first. Preheating pins these megaflows before a job begins. The record is from this
// model or from a switch's counters.
type Matrix struct {
	Source       string // origin of the record, for people
	Destinations []Destination
}

// Destination is the subnet of another node, or one of its containers if nodes have no subnets.
type Destination struct {
	Megaflow
	Packets uint64
}

// matrixHead is the first line of a file. The number is the version of the format.
const matrixHead = "# pilaster traffic matrix 1"

// MostDestinations limits the size of a file; it exceeds the size of any switch.
const MostDestinations = 1 << 20

// Sort sorts by packets, most first, and removes destinations without packets.
func (m *Matrix) Sort() {
	m.Destinations = slices.DeleteFunc(m.Destinations, func(d Destination) bool { return d.Packets == 0 })
	slices.SortFunc(m.Destinations, func(a, b Destination) int {
		return cmp.Or(
			cmp.Compare(b.Packets, a.Packets),
			cmp.Compare(a.VNI, b.VNI),
			a.To.Addr().Compare(b.To.Addr()),
			cmp.Compare(a.To.Bits(), b.To.Bits()),
		)
	})
}

// Write writes a file: the head, the source, and a line for each destination with VNI, prefix and packets.
func (m Matrix) Write(w io.Writer) error {
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "%s\n# %s\n", matrixHead, strings.Join(strings.Fields(m.Source), " "))
	for _, d := range m.Destinations {
		fmt.Fprintf(b, "%d\t%v\t%d\n", d.VNI, d.To, d.Packets)
	}
	return b.Flush()
}

// ReadMatrix parses a file and rejects anything that Write would not write. Lines that begin with #, except the first,
// are comments.
func ReadMatrix(r io.Reader) (m Matrix, err error) {
	seen := map[Megaflow]bool{}
	lines := bufio.NewScanner(r)
	for number := 1; lines.Scan(); number++ {
		line := lines.Text()
		comment, is := strings.CutPrefix(line, "#")
		switch {
		case number == 1 && line != matrixHead:
			return m, fmt.Errorf("line 1 is not %q: the file is no traffic matrix, or has another version", matrixHead)
		case number == 2 && is:
			m.Source = strings.TrimSpace(comment)
			continue
		case is:
			continue
		}
		d, err := parseDestination(line)
		switch {
		case err != nil:
			return m, fmt.Errorf("line %d: %w", number, err)
		case seen[d.Megaflow]:
			return m, fmt.Errorf("line %d: duplicate destination %v of VNI %d", number, d.To, d.VNI)
		case len(m.Destinations) == MostDestinations:
			return m, fmt.Errorf("line %d: more than %d destinations", number, MostDestinations)
		}
		seen[d.Megaflow] = true
		m.Destinations = append(m.Destinations, d)
	}
	if err := lines.Err(); err != nil {
		return m, err
	}
	if len(m.Destinations) == 0 {
		return m, errors.New("the matrix is empty: the node sent nothing to other nodes during the record")
	}
	m.Sort()
	return m, nil
}

func parseDestination(line string) (d Destination, err error) {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return d, fmt.Errorf("%q is not a VNI, a prefix and a number of packets", line)
	}
	vni, err := strconv.ParseUint(fields[0], 10, 24)
	if err != nil || vni == 0 {
		return d, fmt.Errorf("%q is not a VNI", fields[0])
	}
	to, err := netip.ParsePrefix(fields[1])
	if err != nil || to != to.Masked() || to.Addr().Is4In6() {
		return d, fmt.Errorf("%q is not a prefix such as 10.0.3.0/24", fields[1])
	}
	packets, err := strconv.ParseUint(fields[2], 10, 64)
	if err != nil || packets == 0 {
		return d, fmt.Errorf("%q is not a number of packets", fields[2])
	}
	return Destination{Megaflow{pipeline.VNI(vni), to}, packets}, nil
}

// record returns the matrix of the model's traffic to these megaflows.
func (t *Table) record(traffic *Traffic, handles []Handle) (m Matrix) {
	for _, h := range handles {
		m.Destinations = append(m.Destinations, Destination{t.flows[h], traffic.Sent(h, peakBegin, peakEnd)})
	}
	m.Sort()
	return m
}

// Pins returns the megaflows that are in the matrix and in the table, the busiest first.
func (t *Table) Pins(m Matrix) (all []Handle) {
	for _, d := range m.Destinations {
		if h, ok := t.handles[d.Megaflow]; ok {
			all = append(all, h)
		}
	}
	return all
}

// entries returns forwarding entries for all destinations of the matrix.
func (m Matrix) entries() (all []pipeline.Entry) {
	for _, d := range m.Destinations {
		all = append(all, pipeline.Forward{VNI: d.VNI, To: d.To, Port: pipeline.VXLAN})
	}
	return all
}
