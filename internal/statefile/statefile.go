// Package statefile writes small files that survive a crash at any time: after the crash a file has either its old or
// its new content. It has the new content if the write had returned. The package does not interpret the contents.
package statefile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// CorruptError reports a file with invalid content. Nothing was changed.
type CorruptError struct {
	Path string
	Err  error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf(
		"%s cannot be used: %v\n  nothing was changed; restore the file from a backup",
		e.Path,
		e.Err,
	)
}
func (e *CorruptError) Unwrap() error { return e.Err }

// tempPrefix is the prefix of files that are being written. Readers ignore them.
const tempPrefix = ".writing-"

// IsUnfinished reports whether a file of this name belongs to an interrupted write.
func IsUnfinished(name string) bool { return strings.HasPrefix(name, tempPrefix) }

// Write replaces the file by v as JSON.
func (d Disk) Write(path string, v any, mode os.FileMode) error {
	b, err := encode(path, v)
	if err != nil {
		return err
	}
	return d.WriteBytes(path, b, mode)
}

func encode(path string, v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encoding %s: %w", path, err)
	}
	return append(b, '\n'), nil
}

// WriteBytes replaces the file's content.
func (d Disk) WriteBytes(path string, b []byte, mode os.FileMode) error {
	return d.replace(path, b, mode, func() error { return d.on().Sync(filepath.Dir(path)) })
}

func (d Disk) replace(path string, b []byte, mode os.FileMode, syncDir func() error) error {
	err := d.on().Replace(path, b, mode)
	if err == nil {
		err = syncDir()
	}
	return advise(filepath.Dir(path), err)
}

// Replace writes and syncs a temporary file, and renames it to path.
func (machine) Replace(path string, b []byte, mode os.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), tempPrefix+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// advise adds advice to the error of a disk that is full or read-only.
func advise(dir string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w; nothing was changed; make room on the disk of %s", err, dir)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w; nothing was changed; mount the disk of %s writable", err, dir)
	}
	return err
}

// Append adds a line to the file. If it returns an error, it has added nothing. Only a crash may leave part of the line
// at the end of the file. The line is durable after a Sync of the file.
func (d Disk) Append(path, line string, mode os.FileMode) error {
	return advise(filepath.Dir(path), d.on().Append(path, line, mode))
}

func (machine) Append(path, line string, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	was, err := f.Stat()
	if err != nil {
		return err
	}
	if _, err := f.WriteString(line); err != nil {
		// A full disk may have written part of the line.
		return errors.Join(err, f.Truncate(was.Size()))
	}
	return nil
}

// Remove deletes the file durably. It ignores a file that does not exist.
func (d Disk) Remove(path string) error {
	if err := d.on().Remove(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return advise(filepath.Dir(path), err)
	}
	return d.on().Sync(filepath.Dir(path))
}

// Read decodes a file with a format version into v. It refuses unknown fields and trailing data, because this program
// does not write them.
func (d Disk) Read(path string, version int, v any) error {
	b, err := d.on().Read(path)
	if err != nil {
		return err
	}
	if err := DecodeVersion(b, version, v); err != nil {
		return &CorruptError{path, err}
	}
	return nil
}

// DecodeVersion decodes the content of a file. It checks the version first, because a later version may have other
// fields.
func DecodeVersion(b []byte, version int, v any) error { return DecodeSince(b, version, version, v) }

// DecodeSince is DecodeVersion that also accepts the earlier versions from first on. Their fields must be a subset of
// this version's.
func DecodeSince(b []byte, first, version int, v any) error {
	var has struct {
		Version int `json:"version"`
	}
	if json.Unmarshal(b, &has) == nil && has.Version > version {
		return fmt.Errorf("it has version %d and this build knows %d, so %w; start that one", has.Version, version,
			ErrLater)
	}
	if err := Decode(b, v); err != nil {
		return err
	}
	if has.Version < first || has.Version > version {
		return fmt.Errorf("it has version %d and this build knows %d", has.Version, version)
	}
	return nil
}

// Decode decodes JSON without a version.
func Decode(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("it is empty")
		}
		if field, unknown := strings.CutPrefix(err.Error(), "json: unknown field "); unknown { // it has no type
			return fmt.Errorf("this build does not know its field %s; unless it is damaged, %w", field, ErrLater)
		}
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("it has data after the JSON value")
	}
	return nil
}

// Names returns the names of the directory's files with a suffix, without that suffix, sorted. It removes files of
// interrupted writes.
func (d Disk) Names(dir, suffix string) ([]string, error) {
	entries, err := d.on().List(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if IsUnfinished(e.Name()) {
			if err := d.on().Remove(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && e.Type().IsRegular() {
			names = append(names, name)
		}
	}
	return names, nil
}

// LockFile is the name of the file in a directory that Lock locks.
const LockFile = "lock"

// Lock gives this process the exclusive use of the directory until the returned file is closed.
func Lock(dir string) (*os.File, error) {
	path := filepath.Join(dir, LockFile)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, advise(dir, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf(
				"%s is in use by another process\n  nothing was changed; stop that process, or choose another "+
					"directory",
				dir,
			)
		}
		return nil, fmt.Errorf("%s cannot be locked: %w\n  nothing was changed; choose another directory", dir, err)
	}
	return f, nil
}
