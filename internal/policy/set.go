package policy

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/humanize"
)

// set returns the set of a subject in a direction, made from the policies that select the subject; 0 if there are none.
func (c *compiler) set(d Direction, policies []int, at int) (ID, error) {
	if len(policies) == 0 {
		return 0, nil
	}
	key := c.inputsKey(d, policies, at)
	if id, ok := c.sets[key]; ok {
		return id, nil
	}
	m, err := c.collect(d, policies, at)
	if err != nil {
		return 0, err
	}
	id, err := c.build(m)
	c.sets[key] = id
	return id, err
}

// inputsKey encodes the inputs of a subject's set: subjects with the same key share a set.
func (c *compiler) inputsKey(d Direction, policies []int, at int) string {
	of := fmt.Sprint(d, policies)
	if d == Ingress {
		// On ingress, port names refer to ports of the subject.
		ports := c.index.namedPorts(at)
		for _, name := range slices.Sorted(maps.Keys(ports)) {
			of += fmt.Sprint(" ", name, ports[name])
		}
	}
	return of
}

// build adds a set to the tables.
func (c *compiler) build(m setMatches) (ID, error) {
	tables, err := c.tableOfEach(m)
	if err != nil {
		return 0, err
	}
	blocks, err := c.blocksOf(m)
	if err != nil {
		return 0, err
	}
	other := tables[c.index.unknown()]
	b := binary.BigEndian.AppendUint64(nil, uint64(other))
	for i, table := range tables {
		if table != other {
			b = binary.BigEndian.AppendUint16(b, uint16(c.appAt(i)))
			b = binary.BigEndian.AppendUint64(b, uint64(table))
		}
	}
	b = append(b, "blocks"...)
	for _, row := range blocks {
		addr := row.key.Prefix.Addr().As16()
		b = append(append(b, addr[:]...), byte(row.key.Prefix.Bits()))
		b = binary.BigEndian.AppendUint64(b, uint64(row.table))
	}
	id, isNew, err := c.identify("set", b)
	if err != nil || !isNew {
		return id, err
	}
	for i, table := range tables {
		if table != other || i == c.index.unknown() {
			c.rows = append(c.rows, peerRow{PeerKey{id, c.appAt(i)}, Peer{table, len(blocks) > 0}})
		}
	}
	for _, row := range blocks {
		row.key.Set = id
		c.tables.Blocks[row.key] = row.table
	}
	return id, c.fits()
}

// tableOfEach returns the table of ports for the app at each place.
func (c *compiler) tableOfEach(m setMatches) ([]ID, error) {
	class, classes := classify(len(c.index.apps)+2, m.pods)
	made := make([]ID, classes)
	tables := make([]ID, len(class))
	var those []*match
	for i := range class {
		if made[class[i]] == 0 {
			those = those[:0]
			for j := range m.pods {
				if m.pods[j].apps.has(i) {
					those = append(those, &m.pods[j].match)
				}
			}
			id, err := c.table(those, m.isolated)
			if err != nil {
				return nil, err
			}
			made[class[i]] = id
		}
		tables[i] = made[class[i]]
	}
	return tables, nil
}

// classify returns the class of each app, so that apps of one class match the same rules. It goes rule by rule: a rule
// that matches only some apps of a class splits the class.
func classify(places int, matches []podMatch) (class []int, classes int) {
	class = make([]int, places)
	size := []int{places}
	var taken, to []int // by class
	var touched []int
	for _, m := range matches {
		taken, touched = append(taken[:0], make([]int, len(size))...), touched[:0]
		for i := range m.apps.each {
			if taken[class[i]]++; taken[class[i]] == 1 {
				touched = append(touched, class[i])
			}
		}
		to = append(to[:0], taken...)
		for _, from := range touched {
			if to[from] = from; taken[from] < size[from] {
				to[from] = len(size)
				size = append(size, taken[from])
				size[from] -= taken[from]
			}
		}
		for i := range m.apps.each {
			class[i] = to[class[i]]
		}
	}
	return class, len(size)
}

type blockEntry struct {
	key   BlockKey // without the set
	table ID
}

// blocksOf returns the entries for blocks. It omits a prefix with the same table as the next shorter prefix around it.
func (c *compiler) blocksOf(m setMatches) (entries []blockEntry, err error) {
	rows, err := flattenBlocks(m.blocks)
	if err != nil {
		return nil, err
	}
	tables := make([]ID, len(rows))
	for i, row := range rows {
		var those []*match
		for _, j := range row.matches {
			those = append(those, &m.blocks[j].match)
		}
		if tables[i], err = c.table(those, m.isolated); err != nil {
			return nil, err
		}
		if row.within < 0 || tables[row.within] != tables[i] {
			entries = append(entries, blockEntry{BlockKey{Prefix: row.prefix}, tables[i]})
		}
	}
	return entries, nil
}

// table adds a table of ports to the tables.
func (c *compiler) table(matches []*match, isolated uint32) (ID, error) {
	c.key = binary.BigEndian.AppendUint32(c.key[:0], isolated)
	for _, m := range matches {
		c.key = append(c.key, m.key...)
	}
	key := sha256.Sum256(c.key)
	if id, ok := c.ports[key]; ok {
		return id, nil
	}
	t, err := flatten(matches, isolated)
	if err != nil {
		return 0, err
	}
	var b []byte
	for _, r := range t.ports {
		b = append(b, r.key.Protocol, byte(r.key.Scope), byte(r.key.Port>>8), byte(r.key.Port), flag(r.entry.Ranges))
		b = appendVerdict(b, r.entry.Verdict)
	}
	b = append(b, "ranges"...)
	for _, r := range t.ranges {
		b = append(b, r.key.Protocol, r.key.Bits, byte(r.key.Port>>8), byte(r.key.Port))
		b = appendVerdict(b, r.verdict)
	}
	id, isNew, err := c.identify("table", b)
	if err != nil {
		return 0, err
	}
	c.ports[key] = id
	if !isNew {
		return id, nil
	}
	for _, r := range t.ports {
		r.key.Table = id
		c.tables.Ports[r.key] = r.entry
	}
	for _, r := range t.ranges {
		r.key.Table = id
		c.tables.Ranges[r.key] = r.verdict
	}
	return id, c.fits()
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// identify returns the ID of a set's or table's content, and whether this content is new in the run.
func (c *compiler) identify(what string, content []byte) (id ID, isNew bool, err error) {
	sum := sha256.Sum256(append([]byte(what+"\x00"+c.tenant+"\x00"), content...))
	id = ID(binary.BigEndian.Uint64(sum[:]))
	was, known := c.sums[id]
	if id == 0 || known && was != sum {
		return 0, false, fmt.Errorf("two %ss have the same hash %x: rename one of the policies", what, uint64(id))
	}
	c.sums[id] = sum
	return id, !known, nil
}

// fits rejects tables that no node has room for while they are made, so that they do not use up this machine's memory.
func (c *compiler) fits() error {
	t := c.tables
	for what, n := range map[string]int{"peers": len(c.rows), "blocks": len(t.Blocks), "ports": len(t.Ports),
		"ranges of ports": len(t.Ranges)} {
		if n > c.most {
			return fmt.Errorf(
				"they need %s of %s on a node, more than %s: write fewer or simpler rules, or give nodes a higher "+
					"--max-rules and apply them with --force",
				humanize.Of(n, "entry", "entries"),
				what,
				humanize.Grouped(c.most),
			)
		}
	}
	return nil
}
