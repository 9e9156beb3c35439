package tenant

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Place has the data of an identity that are not the container's own labels: its namespace and its named ports.
type Place struct {
	Namespace       string // empty: the namespace label, or else DefaultNamespace
	NamespaceLabels map[string]string
	Ports           map[string]Port // by name
}

// With returns the labels plus those of the place. If the place names a namespace, this namespace replaces one in the
// labels: the author of a container's labels need not have authority over other namespaces.
func (p Place) With(labels map[string]string) map[string]string {
	all := maps.Clone(labels)
	if all == nil {
		all = map[string]string{}
	}
	if p.Namespace != "" {
		delete(all, NamespaceKey)
	}
	if p.Namespace != "" && p.Namespace != DefaultNamespace { // DefaultNamespace is expressed by no label
		all[NamespaceKey] = p.Namespace
	}
	for k, v := range p.NamespaceLabels {
		all[NamespaceLabelKey(k)] = v
	}
	for name, port := range p.Ports {
		k, v := NamedPort(name, port.Number, port.Protocol)
		all[k] = v
	}
	return all
}

// SaysNamespace returns the key of the first label that sets the namespace or a label of it; "" if there is none.
func SaysNamespace(labels map[string]string) string {
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if k == NamespaceKey || strings.HasPrefix(k, namespaceLabelPrefix) {
			return k
		}
	}
	return ""
}

// ParsePort parses 80/TCP; 80 alone means TCP.
func ParsePort(text string) (Port, error) {
	number, protocol, given := strings.Cut(text, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if !given {
		protocol = "TCP"
	}
	if err != nil || n == 0 || !slices.Contains([]string{"TCP", "UDP", "SCTP"}, protocol) {
		return Port{}, fmt.Errorf("port %.40q: use 80/TCP, 53/UDP or 9/SCTP", text)
	}
	return Port{uint16(n), protocol}, nil
}

// ParsePorts parses "http=80/TCP,dns=53/UDP".
func ParsePorts(text string) (map[string]Port, error) {
	ports := map[string]Port{}
	if strings.TrimSpace(text) == "" {
		return ports, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		name, port, ok := strings.Cut(strings.TrimSpace(part), "=")
		if err := CheckPortName(name); err != nil || !ok {
			return nil, fmt.Errorf("ports %.100q: %.40q is not NAME=80/TCP", text, part)
		}
		if _, twice := ports[name]; twice {
			return nil, fmt.Errorf("ports %.100q: %s is given twice", text, name)
		}
		p, err := ParsePort(port)
		if err != nil {
			return nil, err
		}
		ports[name] = p
	}
	return ports, nil
}

// CheckPortName refuses what Kubernetes does not accept as a port name.
func CheckPortName(name string) error {
	fits := func(r rune) bool { return 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-' }
	if name == "" || len(name) > 15 || strings.Trim(name, "-") != name ||
		strings.ContainsFunc(name, func(r rune) bool { return !fits(r) }) {
		return fmt.Errorf("%.40q is no name of a port: up to 15 small letters, digits and hyphens", name)
	}
	return nil
}
