#include "engine/http/server.h"

#include <sys/socket.h>

#include <atomic>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>

namespace tare::engine::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bhttp = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

std::chrono::nanoseconds Nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

struct Counters {
  std::atomic<int64_t> connections{0}, accepted{0}, requests{0}, malformed{0}, timed_out{0},
      too_slow{0};
};

std::string Head(int status, std::string_view content_type, bool keep_alive,
                 std::optional<size_t> length, bool chunked,
                 const std::map<std::string, std::string>& headers) {
  std::string head = fmt::format("HTTP/1.1 {} {}\r\n", status, ReasonPhrase(status));
  if (!content_type.empty()) head += fmt::format("Content-Type: {}\r\n", content_type);
  if (length) head += fmt::format("Content-Length: {}\r\n", *length);
  if (chunked) head += "Transfer-Encoding: chunked\r\nCache-Control: no-cache\r\n";
  for (const auto& [name, value] : headers) head += fmt::format("{}: {}\r\n", name, value);
  head += keep_alive ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
  return head;
}

class Session;

struct Shared {
  asio::io_context io{1};
  ServerConfig config;
  Handler handler;
  Counters counters;
  // Who holds a responder last ends its session, on whatever thread.
  std::mutex sessions_mutex;
  std::unordered_set<Session*> sessions;
  bool stopping = false;  // the server's thread only
};

// One connection. Everything runs on the io thread; Responder calls from elsewhere are posted.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(std::shared_ptr<Shared> shared, tcp::socket socket)
      : shared_(std::move(shared)), stream_(std::move(socket)), read_timer_(shared_->io) {
    const std::lock_guard lock(shared_->sessions_mutex);
    shared_->sessions.insert(this);
    shared_->counters.connections++;
  }
  ~Session() {
    const std::lock_guard lock(shared_->sessions_mutex);
    shared_->sessions.erase(this);
    shared_->counters.connections--;
  }

  // What was refused before any route saw it; `param` names the part of the request.
  void Refuse(int status) {
    keep_alive_ = false;
    responding_ = true;
    const ServerConfig& c = shared_->config;
    std::string message(ReasonPhrase(status)), param;
    if (status == 413) {
      message = fmt::format("body: more than {} bytes", c.max_body_bytes);
      param = "body";
    } else if (status == 431) {
      message = fmt::format("headers: more than {} bytes", c.max_header_bytes);
      param = "headers";
    } else if (status == 408) {
      message = fmt::format("request: not complete after {} s", c.read_seconds);
      param = "request";
    } else if (status == 400) {
      message = "request: not HTTP/1.1";
      param = "request";
    }
    const std::string body =
        fmt::format("{{\"error\":{{\"message\":\"{}\",\"type\":\"{}\",\"param\":{},\"code\":{}}}}}",
                    message, status < 500 ? "BadRequestError" : "ServerError",
                    param.empty() ? "null" : "\"" + param + "\"", status);
    Queue(Head(status, "application/json", false, body.size(), false, {}) + body);
    Finish();
  }

  void ReadRequest() {
    parser_.emplace();
    parser_->header_limit(static_cast<uint32_t>(shared_->config.max_header_bytes));
    parser_->body_limit(shared_->config.max_body_bytes);
    StartReadTimer(buffer_.size() > 0 ? shared_->config.read_seconds
                                      : shared_->config.idle_seconds);
    bhttp::async_read_header(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](error_code e, size_t) { self->HaveHeader(e); });
  }

  // True while an answer is owed or being written.
  bool responding() const { return responding_; }

  void Close() {
    if (closed_) return;
    closed_ = true;
    gone_ = true;
    read_timer_.cancel();
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
    stream_.socket().close(ignored);
    if (on_close_ && responding_) std::exchange(on_close_, nullptr)();
    on_close_ = nullptr;
  }

  // Called through a Responder, on the io thread. `turn` names the request it answers.
  void Send(uint64_t turn, int status, const std::string& type, const std::string& body,
            const std::map<std::string, std::string>& headers) {
    if (turn != turn_ || closed_ || begun_) return;
    begun_ = true;
    Queue(Head(status, type, keep_alive_, body.size(), false, headers) +
          (head_request_ ? "" : body));
    Finish();
  }
  void BeginStream(uint64_t turn, const std::string& type) {
    if (turn != turn_ || closed_ || begun_) return;
    begun_ = streaming_ = true;
    chunked_ = http11_;
    if (!chunked_) keep_alive_ = false;
    Queue(Head(200, type, keep_alive_, std::nullopt, chunked_, {}));
  }
  void Write(uint64_t turn, const std::string& chunk) {
    if (turn != turn_ || closed_ || !streaming_ || chunk.empty()) return;
    Queue(chunked_ ? fmt::format("{:x}\r\n{}\r\n", chunk.size(), chunk) : chunk);
  }
  void End(uint64_t turn) {
    if (turn != turn_ || closed_ || !streaming_) return;
    streaming_ = false;
    if (chunked_) Queue("0\r\n\r\n");
    Finish();
  }
  void SetOnClose(uint64_t turn, std::function<void()> callback) {
    if (turn != turn_) return;
    if (closed_) {
      callback();
    } else {
      on_close_ = std::move(callback);
    }
  }
  void Dropped(uint64_t turn) {
    if (turn != turn_ || closed_ || !responding_ || finished_) return;
    if (begun_) {
      Close();  // a stream without an end: the client sees it cut
    } else {
      begun_ = true;
      keep_alive_ = false;
      Refuse(500);
    }
  }

  asio::io_context& io() { return shared_->io; }
  // From any thread: nothing more can be said to this client. Nothing is posted then, so that a
  // stopped server keeps no session alive.
  bool gone() const { return gone_; }

 private:
  void HaveHeader(error_code e) {
    if (e == bhttp::error::end_of_stream || closed_) return Close();
    if (e) return ReadFailed(e);
    StartReadTimer(shared_->config.read_seconds);
    if (beast::iequals(parser_->get()[bhttp::field::expect], "100-continue")) {
      auto reply = std::make_shared<std::string>("HTTP/1.1 100 Continue\r\n\r\n");
      asio::async_write(stream_, asio::buffer(*reply),
                        [self = shared_from_this(), reply](error_code error, size_t) {
                          if (error) return self->Close();
                          self->ReadBody();
                        });
      return;
    }
    ReadBody();
  }

  // The stream's own expiry closes the socket, and then nobody can be told; this one only ends the
  // read.
  void StartReadTimer(double seconds) {
    timed_out_ = false;
    read_timer_.expires_after(Nanoseconds(seconds));
    read_timer_.async_wait([self = shared_from_this()](error_code e) {
      if (e || self->closed_ || self->responding_) return;
      self->timed_out_ = true;
      error_code ignored;
      self->stream_.socket().cancel(ignored);
    });
  }

  void ReadBody() {
    bhttp::async_read(stream_, buffer_, *parser_,
                      [self = shared_from_this()](error_code e, size_t) {
                        if (e) return self->ReadFailed(e);
                        self->HaveRequest();
                      });
  }

  void ReadFailed(error_code e) {
    if (e == asio::error::operation_aborted && timed_out_) {
      shared_->counters.timed_out++;
      // An idle connection just ends; a half-sent request is told.
      if (parser_->got_some()) return Refuse(408);
      return Close();
    }
    if (e == bhttp::error::body_limit) return Refuse(413);
    if (e == bhttp::error::header_limit) return Refuse(431);
    if (e.category() == make_error_code(bhttp::error::bad_version).category() &&
        e != bhttp::error::partial_message && e != bhttp::error::end_of_stream) {
      shared_->counters.malformed++;
      return Refuse(400);
    }
    Close();
  }

  void HaveRequest();

  void Queue(std::string bytes) {
    pending_bytes_ += bytes.size();
    if (pending_bytes_ > shared_->config.max_pending_bytes + bytes.size()) {
      shared_->counters.too_slow++;
      return Close();
    }
    out_.push_back(std::move(bytes));
    if (out_.size() == 1) WriteNext();
  }

  void WriteNext() {
    stream_.expires_after(Nanoseconds(shared_->config.write_seconds));
    asio::async_write(stream_, asio::buffer(out_.front()),
                      [self = shared_from_this()](error_code e, size_t) {
                        if (e) {
                          if (e == beast::error::timeout) self->shared_->counters.too_slow++;
                          return self->Close();
                        }
                        self->pending_bytes_ -= self->out_.front().size();
                        self->out_.pop_front();
                        if (!self->out_.empty()) return self->WriteNext();
                        self->stream_.expires_never();
                        if (self->finished_) self->Done();
                      });
  }

  void Finish() {
    finished_ = true;
    if (out_.empty()) Done();
  }

  void Done() {
    if (closed_) return;
    responding_ = false;
    on_close_ = nullptr;
    ++turn_;
    if (!keep_alive_ || shared_->stopping) {
      error_code ignored;
      stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
      return Close();
    }
    finished_ = begun_ = streaming_ = false;
    ReadRequest();
  }

  // While an answer is owed nothing is read, so a vanished client would not be noticed until the
  // next write. Wait for readability and look without taking: no byte means it has closed.
  void WatchForClose() {
    stream_.socket().async_wait(
        tcp::socket::wait_read, [self = shared_from_this(), turn = turn_](error_code e) {
          if (e || self->closed_ || turn != self->turn_ || !self->responding_) return;
          char byte = 0;
          const ssize_t got =
              ::recv(self->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
          if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK))
            return self->Close();
          // A pipelined request waits its turn; the watch ends, since the socket stays readable.
        });
  }

  std::shared_ptr<Shared> shared_;
  beast::tcp_stream stream_;
  asio::steady_timer read_timer_;
  bool timed_out_ = false;
  beast::flat_buffer buffer_;
  std::optional<bhttp::request_parser<bhttp::string_body>> parser_;
  std::deque<std::string> out_;
  size_t pending_bytes_ = 0;
  uint64_t turn_ = 0;
  bool keep_alive_ = true, http11_ = true, head_request_ = false, chunked_ = false;
  bool responding_ = false, begun_ = false, streaming_ = false, finished_ = false, closed_ = false;
  std::atomic<bool> gone_{false};
  std::function<void()> on_close_;
};

class SessionResponder : public Responder {
 public:
  SessionResponder(std::shared_ptr<Session> session, uint64_t turn)
      : session_(std::move(session)), turn_(turn) {}
  ~SessionResponder() override {
    Post([](Session* s, uint64_t turn) { s->Dropped(turn); });
  }
  void Send(int status, std::string_view type, std::string body,
            std::map<std::string, std::string> headers) override {
    Post([status, type = std::string(type), body = std::move(body), headers = std::move(headers)](
             Session* s, uint64_t turn) { s->Send(turn, status, type, body, headers); });
  }
  void BeginStream(std::string_view type) override {
    Post([type = std::string(type)](Session* s, uint64_t turn) { s->BeginStream(turn, type); });
  }
  void Write(std::string chunk) override {
    Post([chunk = std::move(chunk)](Session* s, uint64_t turn) { s->Write(turn, chunk); });
  }
  void End() override {
    Post([](Session* s, uint64_t turn) { s->End(turn); });
  }
  void OnClose(std::function<void()> callback) override {
    if (session_->gone()) return callback();
    Post([callback = std::move(callback)](Session* s, uint64_t turn) {
      s->SetOnClose(turn, callback);
    });
  }

 private:
  template <typename F>
  void Post(F f) {
    if (session_->gone()) return;
    asio::post(session_->io(),
               [s = session_, turn = turn_, f = std::move(f)] { f(s.get(), turn); });
  }

  std::shared_ptr<Session> session_;
  uint64_t turn_;
};

void Session::HaveRequest() {
  const auto& message = parser_->get();
  shared_->counters.requests++;
  auto request = std::make_shared<Request>();
  request->method = std::string(message.method_string());
  const std::string target(message.target());
  const size_t mark = target.find('?');
  request->path = target.substr(0, mark);
  if (mark != std::string::npos) request->query = target.substr(mark + 1);
  for (const auto& field : message) {
    std::string name(field.name_string());
    for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    std::string& value = request->headers[name];
    value += (value.empty() ? "" : ", ") + std::string(field.value());
  }
  keep_alive_ = message.keep_alive();
  http11_ = message.version() >= 11;
  head_request_ = message.method() == bhttp::verb::head;
  request->body = std::move(parser_->get().body());
  responding_ = true;
  read_timer_.cancel();
  WatchForClose();
  shared_->handler(std::move(request),
                   std::make_shared<SessionResponder>(shared_from_this(), turn_));
}

class AsioServer final : public Server {
 public:
  explicit AsioServer(std::shared_ptr<Shared> shared)
      : shared_(std::move(shared)), acceptor_(shared_->io) {}
  ~AsioServer() override { Stop(0); }

  Status Listen() {
    error_code e;
    const asio::ip::address address = asio::ip::make_address(shared_->config.host, e);
    if (e) {
      return InvalidArgument(
          "host {}: not an IP address (127.0.0.1 is this machine, 0.0.0.0 all interfaces)",
          shared_->config.host);
    }
    const tcp::endpoint endpoint(address, shared_->config.port);
    acceptor_.open(endpoint.protocol(), e);
    if (!e) acceptor_.set_option(asio::socket_base::reuse_address(true), e);
    if (!e) acceptor_.bind(endpoint, e);
    if (!e) acceptor_.listen(asio::socket_base::max_listen_connections, e);
    if (e)
      return Error(Code::kIo, "listen on {}:{}: {}", shared_->config.host, shared_->config.port,
                   e.message());
    port_ = acceptor_.local_endpoint().port();
    Accept();
    thread_ = std::thread([shared = shared_] {
      const auto work = asio::make_work_guard(shared->io);
      shared->io.run();
    });
    return Ok();
  }

  uint16_t port() const override { return port_; }

  ServerStats stats() const override {
    const Counters& c = shared_->counters;
    return {.connections = c.connections,
            .accepted = c.accepted,
            .requests = c.requests,
            .malformed = c.malformed,
            .timed_out = c.timed_out,
            .too_slow = c.too_slow};
  }

  void Stop(double seconds) override {
    if (!thread_.joinable()) return;
    asio::post(shared_->io, [this] {
      shared_->stopping = true;
      error_code ignored;
      acceptor_.close(ignored);
      for (const auto& s : Live()) {
        if (!s->responding()) s->Close();
      }
    });
    const auto deadline = std::chrono::steady_clock::now() + Nanoseconds(seconds);
    while (shared_->counters.connections > 0 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    asio::post(shared_->io, [this] {
      for (const auto& s : Live()) s->Close();
      // Whatever was posted before this runs first; then the loop ends.
      asio::post(shared_->io, [this] { shared_->io.stop(); });
    });
    thread_.join();
  }

 private:
  std::vector<std::shared_ptr<Session>> Live() {
    std::vector<std::shared_ptr<Session>> live;
    const std::lock_guard lock(shared_->sessions_mutex);
    // One whose last holder is just letting go waits for this lock to leave.
    for (Session* s : shared_->sessions) {
      if (auto held = s->weak_from_this().lock()) live.push_back(std::move(held));
    }
    return live;
  }

  void Accept() {
    acceptor_.async_accept([this](error_code e, tcp::socket socket) {
      if (e == asio::error::operation_aborted || !acceptor_.is_open()) return;
      if (!e) {
        shared_->counters.accepted++;
        error_code ignored;
        socket.set_option(tcp::no_delay(true), ignored);
        const bool full = [&] {
          const std::lock_guard lock(shared_->sessions_mutex);
          return std::ssize(shared_->sessions) >= shared_->config.max_connections;
        }();
        const auto session = std::make_shared<Session>(shared_, std::move(socket));
        if (full) {
          session->Refuse(503);
        } else {
          session->ReadRequest();
        }
        return Accept();
      }
      // Out of descriptors, most likely: wait a little instead of spinning.
      auto timer = std::make_shared<asio::steady_timer>(shared_->io, std::chrono::milliseconds(50));
      timer->async_wait([this, timer](error_code) {
        if (acceptor_.is_open()) Accept();
      });
    });
  }

  std::shared_ptr<Shared> shared_;
  tcp::acceptor acceptor_;
  uint16_t port_ = 0;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Server>> Server::Start(const ServerConfig& config, Handler handler) {
  auto shared = std::make_shared<Shared>();
  shared->config = config;
  shared->handler = std::move(handler);
  auto server = std::make_unique<AsioServer>(shared);
  TARE_RETURN_IF_ERROR(server->Listen());
  return std::unique_ptr<Server>(std::move(server));
}

std::string_view ReasonPhrase(int status) {
  const boost::string_view phrase = bhttp::obsolete_reason(static_cast<bhttp::status>(status));
  return {phrase.data(), phrase.size()};
}

}  // namespace tare::engine::http
