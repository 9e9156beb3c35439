package scenario

import "errors"

// Once builds a scenario over two nodes in dir, which must not exist, lets use have its pair, and
// takes all of it away again. Nothing is measured.
func Once(dir string, s Scenario, use func(Pair) error) (err error) {
	w, err := NewWire(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	pair, err := s.Build(w)
	if err != nil {
		return err
	}
	return use(pair)
}
